"""The smallest tests that tell sick code from healthy code: a second each, at the most.

Each gets the settings of a run and raises AssertionError if the code that the training loop would
use now has the bug. They ask for the loop's functions by name, so that they see what is in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minigrpo import arithmetic, grpo, objective
from minigrpo.arithmetic import Arithmetic
from minigrpo.clinic.bugs import score
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.llama import load_policy
from minigrpo.sampling import Rollouts


@cache
def _llama() -> nn.Module:
    return load_policy()


def _eight(config: GRPOConfig) -> Rollouts:
    prompts = torch.stack([arithmetic.prompt_ids((7, 4, 9, 5))] * 8)
    generator = torch.Generator().manual_seed(0)
    return grpo.sample(
        _llama(), prompts, max_new_tokens=16, eos_id=config.eos_id, pad_id=config.pad_id,
        temperature=config.temperature, generator=generator,
    )  # fmt: skip


def _steps(config: GRPOConfig, steps: int, **changes: Any) -> list[StepMetrics]:
    # A bug is this test's to report, not the loop's own checks'.
    config = replace(config, steps=steps, prompts_per_step=4, check=False, **changes)
    return list(train_grpo(load_policy(), Arithmetic(), config))


class _Successor(nn.Module):
    """After token t comes t + 1, for certain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        class Output:
            logits = 100.0 * nn.functional.one_hot((input_ids + 1) % 32, 32).double()
            past_key_values = None

        return Output()


def a_certain_text_has_log_prob_0(config: GRPOConfig) -> None:
    text, real = torch.arange(1, 9)[None], torch.ones(1, 8, dtype=torch.bool)
    log_probs, _ = grpo.completion_log_probs_and_entropy(
        _Successor(), text[:, :4], real[:, :4], text[:, 4:], real[:, 4:]
    )
    assert log_probs.abs().max() < 1e-6, f"log-probs of a certain text: {log_probs.tolist()}"


def relative_change(start: Iterable[Tensor], end: Iterable[Tensor]) -> float:
    """Norm of the difference of two sets of weights over the norm of the first."""
    pairs = list(zip(start, end, strict=True))
    change = sum((p.detach() - q).square().sum() for q, p in pairs)
    return (change / sum(q.square().sum() for q, _ in pairs)).sqrt().item()


def weights_move(config: GRPOConfig) -> None:
    policy = load_policy()
    start = [p.detach().clone() for p in policy.parameters()]
    list(train_grpo(policy, Arithmetic(), replace(config, steps=5, prompts_per_step=4)))
    moved = relative_change(start, policy.parameters())
    assert moved > 1e-3, f"after 5 steps the weights have moved by {moved:.1e} of their size"


def a_wrong_answer_is_not_paid(config: GRPOConfig) -> None:
    prompt, wrong = arithmetic.prompt_ids((7, 4, 9)), arithmetic.completion_ids([], 9)
    paid = Arithmetic().reward([prompt], [torch.tensor(wrong)])
    assert paid == [0.0], f"the answer is 0, and 9 was paid {paid[0]}"


def the_ratio_has_a_gradient(config: GRPOConfig) -> None:
    log_probs, zeros = torch.zeros(1, 3, requires_grad=True), torch.zeros(1, 3)
    loss, _ = grpo.grpo_loss(log_probs, zeros, torch.ones(1), zeros + 1, level=config.level)
    loss.backward()
    assert log_probs.grad.abs().min() > 0.1, f"its gradient: {log_probs.grad.tolist()}"


def the_kl_is_0_before_the_first_update(config: GRPOConfig) -> None:
    (first,) = _steps(config, 1, inner_epochs=1, kl_weight=0.01)
    assert abs(first.kl) < 1e-3, f"KL at the first update: {first.kl:.2f}"


def the_loss_depends_on_the_reference(config: GRPOConfig) -> None:
    zeros, mask = torch.zeros(1, 3), torch.ones(1, 3).bool()
    far, near = (
        grpo.grpo_loss(zeros, zeros, zeros[:, 0], mask, ref_log_probs=ref, kl_weight=1.0)[0]
        for ref in (zeros - 1, zeros)
    )
    assert far != near, f"with another reference the loss is the same, {near}"


def the_kl_term_has_a_mean_gradient(config: GRPOConfig) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    log_probs, ref = logits.log_softmax(0), torch.zeros(4, dtype=torch.float64).log_softmax(0)
    kl = objective.kl_estimate(log_probs[None], ref[None], estimator=config.estimator)
    (kl * log_probs.detach().exp()).sum().backward()  # the mean over all four tokens
    assert logits.grad.norm() > 1e-3, f"mean gradient of the KL term: {logits.grad.norm():.1e}"


def a_low_ratio_of_a_bad_token_is_left_alone(config: GRPOConfig) -> None:
    ratio = torch.tensor([[0.5]], requires_grad=True)
    objective.clipped_surrogate(ratio, torch.tensor([[-1.0]]), (0.2, 0.2)).sum().backward()
    assert ratio.grad.item() == 0, f"A = -1, ratio 0.5: gradient {ratio.grad.item()}, not 0"


def the_entropy_bonus_has_a_gradient(config: GRPOConfig) -> None:
    zeros, entropy = torch.zeros(1, 3), torch.ones(1, 3, requires_grad=True)
    log_probs = torch.zeros(1, 3, requires_grad=True)
    loss, _ = grpo.grpo_loss(
        log_probs, zeros, zeros[:, 0], zeros + 1, entropy=entropy, entropy_weight=0.1
    )
    loss.backward()
    assert entropy.grad is not None, "no gradient reaches the entropy"


def the_ratio_is_1_at_every_first_update(config: GRPOConfig) -> None:
    for m in _steps(config, 3, inner_epochs=1):
        off = max(m.ratio_max - 1, 1 - m.ratio_min)
        assert off < 1e-3, f"step {m.step}: the ratio is off 1 by {off:.2f}"


def sampler_and_scorer_agree(config: GRPOConfig) -> None:
    rollouts = _eight(config)
    scored = score(_llama(), rollouts, config.temperature)
    off = (scored - rollouts.log_probs).abs().max().item()
    assert off < 1e-3, f"sampled and scored log-probs differ by {off:.2f} nats"


def completions_end(config: GRPOConfig) -> None:
    mask = _eight(config).completion_mask
    assert not mask.all(), f"all of {len(mask)} completions run to the limit"


def loss_off_by_hand(m: StepMetrics, without_last: bool = False) -> float:
    """How far the loss is from the one computed by hand, of an on-policy batch without KL.

    All ratios are 1, so the token mean is -sum of A_i |o_i| over the sum of |o_i|; `without_last`
    counts one token less in every row, as if its EOS were masked.
    """
    lengths = m.rollouts.completion_mask.sum(1) - int(without_last)
    by_hand = -(m.advantages.cpu() * lengths).sum() / lengths.sum()
    return abs(m.loss - by_hand.item())


def the_loss_is_the_one_by_hand(config: GRPOConfig) -> None:
    plain = {"kl_weight": 0.0, "entropy_weight": 0.0, "how": "token_mean"}
    (first,) = _steps(config, 1, inner_epochs=1, **plain)
    off = loss_off_by_hand(first)
    assert off < 1e-5, f"the loss is off the one by hand by {off:.4f}"


def the_filling_gets_no_gradient(config: GRPOConfig) -> None:
    log_probs, mask = torch.zeros(1, 3, requires_grad=True), torch.tensor([[True, True, False]])
    how = {"how": config.how, "max_length": 3}
    loss, _ = grpo.grpo_loss(log_probs, torch.zeros(1, 3), torch.ones(1), mask, **how)
    loss.backward()
    assert log_probs.grad[0, 2] == 0, f"gradient of the filling: {log_probs.grad[0, 2].item():.2f}"


def prompts_end_in_the_last_column(config: GRPOConfig) -> None:
    ids, _ = grpo.left_pad([torch.tensor([5, 6, 7]), torch.tensor([8])], config.pad_id)
    assert ids[:, -1].tolist() == [7, 8], f"last column: {ids[:, -1].tolist()}"


def luck_of_the_prompt_is_no_advantage(config: GRPOConfig) -> None:
    # Three prompts of two: with as many prompts as members a wrong shape goes unnoticed.
    advantages = grpo.group_advantages(torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0]), 2)
    largest = advantages.abs().max().item()
    assert largest == 0, f"an easy prompt, a hard one, an easy one: advantages up to {largest:.2f}"


def equal_rewards_give_no_advantage(config: GRPOConfig) -> None:
    advantages = grpo.group_advantages(torch.full((8,), 0.7), 8)
    assert advantages.abs().max() == 0, f"eight times 0.7: advantages {advantages[0].item()}"


def a_small_drift_of_a_long_text_keeps_its_gradient(config: GRPOConfig) -> None:
    log_probs = torch.full((1, 64), 0.01, requires_grad=True)  # one percent likelier, each token
    zeros = torch.zeros(1, 64)
    loss, _ = grpo.grpo_loss(log_probs, zeros, torch.ones(1), zeros + 1, level=config.level)
    loss.backward()
    assert log_probs.grad.abs().max() > 0, "64 tokens, one percent each: the gradient is 0"


def rewards_do_not_ask_the_policy(config: GRPOConfig) -> None:
    rollouts, config = _eight(config), replace(config, prompts_per_step=1, group_size=8)
    rewards = []
    for log_probs in (rollouts.log_probs, rollouts.log_probs / 2):
        drawn = replace(rollouts, log_probs=log_probs)
        with patch.object(grpo, "sample", lambda *_, **__: drawn):  # noqa: B023 (used at once)
            prompts = [rollouts.prompt_ids[0]]
            rewards.append(grpo.rollout(_llama(), Arithmetic(), prompts, config, None)[1])
    assert torch.equal(*rewards), "the surer, the better"
