"""The smallest tests that tell sick code from healthy code. Copy this file into your project.

It needs torch and nothing else. Every test takes functions of yours, runs in well under a second
(plus what your functions take), and raises AssertionError with a sentence if the code has the bug:

    from smallest_tests import *
    the_padding_gets_no_gradient(my_loss)
    equal_rewards_give_no_advantage(my_advantages)
    sampler_and_scorer_agree(my_sample, my_score)

    loss(log_probs, old_log_probs, advantages, mask) -> a tensor: (N, T), (N, T), (N,), (N, T)
    advantages(rewards, group_size) -> (N,), where rows 0 to group_size - 1 answer prompt 0
    sample() -> rollout, log_probs (N, T), mask (N, T): the rollout is whatever your scorer needs
    score(rollout) -> log_probs (N, T)
    reward(completion) -> a number (wrap functions that look different in a lambda)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Loss, Advantages = Callable[..., Tensor], Callable[[Tensor, int], Tensor]
Sample = Callable[[], tuple[Any, Tensor, Tensor]]


# ----- the loss


def _gradient(loss: Loss, log_probs: Tensor, advantage: float, mask: Tensor | None = None):
    """Of one row at old log-probs of 0."""
    new, mask = log_probs.clone().requires_grad_(), log_probs > -9 if mask is None else mask
    value = loss(new, torch.zeros_like(log_probs), torch.full((1,), advantage), mask)
    assert value.requires_grad, "the loss has no gradient at all"
    (gradient,) = torch.autograd.grad(value, new, allow_unused=True)
    return torch.zeros_like(new) if gradient is None else gradient


def the_ratio_has_a_gradient(loss: Loss) -> None:
    gradient = _gradient(loss, torch.zeros(1, 3), 1.0)
    assert gradient.abs().min() > 1e-3, f"at ratio 1 and A = 1 the gradient is {gradient.tolist()}"


def the_padding_gets_no_gradient(loss: Loss) -> None:
    gradient = _gradient(loss, torch.zeros(1, 3), 1.0, torch.tensor([[True, True, False]]))
    assert gradient[0, 2] == 0, f"the gradient of a padding token is {gradient[0, 2].item():.2f}"


def a_low_ratio_of_a_bad_token_is_left_alone(loss: Loss) -> None:
    gradient = _gradient(loss, torch.tensor([[0.5]]).log(), -1.0).item()
    assert gradient == 0, f"at A = -1 and ratio 0.5 the gradient is {gradient:.2f}, not 0"


def a_small_drift_of_a_long_text_keeps_its_gradient(loss: Loss) -> None:
    gradient = _gradient(loss, torch.full((1, 64), 0.01), 1.0)  # each token 1 percent more likely
    assert gradient.abs().max() > 0, "64 tokens, each 1 percent more likely: the gradient is 0"


def the_loss_depends_on_the_reference(loss: Loss) -> None:
    """loss(log_probs, old_log_probs, advantages, mask, ref_log_probs), with the KL term on."""
    zeros = torch.zeros(1, 3)
    far, near = (loss(zeros, zeros, zeros[:, 0], zeros == 0, ref) for ref in (zeros - 1, zeros))
    assert far != near, f"with another reference the loss is the same, {near}"


def the_kl_term_has_a_mean_gradient(kl: Callable[[Tensor, Tensor], Tensor]) -> None:
    """kl(log_probs, ref_log_probs) -> the estimate of every token, all (N, T)."""
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    log_probs, ref = logits.log_softmax(0), torch.zeros_like(logits).log_softmax(0)
    (kl(log_probs[None], ref[None]) * log_probs.detach().exp()).sum().backward()  # all 4 tokens
    assert logits.grad.norm() > 1e-3, f"mean gradient of the KL term: {logits.grad.norm():.1e}"


def the_entropy_bonus_has_a_gradient(loss: Loss) -> None:
    """loss(log_probs, old_log_probs, advantages, mask, entropy), with the bonus on."""
    zeros, entropy = torch.zeros(1, 3), torch.ones(1, 3, requires_grad=True)
    loss(zeros.clone().requires_grad_(), zeros, zeros[:, 0], zeros == 0, entropy).backward()
    assert entropy.grad is not None, "no gradient reaches the entropy"


# ----- rewards and advantages


def a_right_answer_is_rewarded(reward: Callable[[Any], float], right: Any) -> None:
    """`right` is a completion that you'd pay for, as your sampler writes it."""
    assert reward(right) > 0, f"a correct completion was rewarded {float(reward(right))}"


def a_wrong_answer_is_not_rewarded(reward: Callable[[Any], float], wrong: Any) -> None:
    assert reward(wrong) == 0, f"a wrong completion was rewarded {float(reward(wrong))}"


def luck_of_the_prompt_is_no_advantage(advantages: Advantages) -> None:
    # Three prompts of two: with as many prompts as members a wrong shape goes unnoticed.
    largest = advantages(torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0]), 2).abs().max().item()
    assert largest == 0, f"an easy prompt, a hard one, an easy one: advantages up to {largest:.2f}"


def equal_rewards_give_no_advantage(advantages: Advantages) -> None:
    for reward in (1.0, 0.7):  # the mean of eight 0.7 is off by rounding
        advantage = advantages(torch.full((8,), reward), 8)[0].item()
        assert advantage == 0, f"eight times {reward}: advantages {advantage}"


def rewards_do_not_ask_the_policy(rewards: Callable[[float], Tensor]) -> None:
    """rewards(factor): of the same completions, with the sampler's log-probs times the factor."""
    assert torch.equal(rewards(1.0), rewards(0.5)), "the rewards depend on the policy's log-probs"


# ----- sampler, scorer and padding


class Successor(nn.Module):
    """A model that knows: after token t comes t + 1. It is called as transformers' models are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        logits = 100.0 * nn.functional.one_hot((input_ids + 1) % 32, 32).double()
        return SimpleNamespace(logits=logits, past_key_values=None)


def a_certain_text_has_log_prob_0(score: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
    """score(model, prompt_ids (1, 4), completion_ids (1, 4)) -> log-probs of the completion."""
    log_probs = score(Successor(), torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6, 7, 8]]))
    assert log_probs.abs().max() < 1e-6, f"log-probs of a certain text: {log_probs.tolist()}"


def sampler_and_scorer_agree(sample: Sample, score: Callable[[Any], Tensor]) -> None:
    rollout, log_probs, mask = sample()
    off = torch.where(mask.bool(), score(rollout) - log_probs, 0.0).abs().max().item()
    assert off < 1e-3, f"sampled and scored log-probs differ by {off:.2f} nats"


def completions_end(sample: Sample) -> None:
    mask = sample()[2]
    assert not mask.all(), f"all of {len(mask)} completions run to the limit"


def prompts_end_in_the_last_column(pad: Callable[[list[Tensor]], Tensor]) -> None:
    last = pad([torch.tensor([5, 6, 7]), torch.tensor([8])])[:, -1].tolist()
    assert last == [7, 8], f"the prompts (5, 6, 7) and (8), once padded, end in {last}"


# ----- the loop


def relative_change(start: Iterable[Tensor], end: Iterable[Tensor]) -> float:
    """Norm of the difference of two sets of weights over the norm of the first."""
    pairs = list(zip(start, end, strict=True))
    change = sum((p.detach() - q).square().sum() for q, p in pairs)
    return (change / sum(q.square().sum() for q, _ in pairs)).sqrt().item()


def weights_move(model: nn.Module, train: Callable[[], Any]) -> None:
    """train() takes five steps, say, on the model."""
    start = [p.detach().clone() for p in model.parameters()]
    train()
    moved = relative_change(start, model.parameters())
    assert moved > 1e-3, f"after training the weights have moved by {moved:.1e} of their size"


def the_kl_is_0_before_the_first_update(kl: Callable[[], float]) -> None:
    """kl() is the mean KL to the reference that the first step reports."""
    assert abs(first := float(kl())) < 1e-3, f"KL at the first update: {first:.2f}"


def the_ratio_is_1_at_every_first_update(ratios: Callable[[], Iterable[Tensor]]) -> None:
    """ratios() gives the ratios of the first update of each of a few steps."""
    for step, ratio in enumerate(ratios()):
        off = (ratio - 1).abs().max().item()
        assert off < 1e-3, f"step {step}: the ratio is off 1 by {off:.2f}"


def the_loss_is_the_one_by_hand(step: Callable[[], tuple[float, Tensor, Tensor]]) -> None:
    """step() -> loss, advantages, mask: a first update, by token mean, without KL or entropy.

    There all ratios are 1, so the loss is -sum of A_i |o_i| over the sum of |o_i|.
    """
    loss, advantages, mask = step()
    lengths = mask.sum(1)
    off = abs(float(loss) + ((advantages * lengths).sum() / lengths.sum()).item())
    assert off < 1e-5, f"the loss is off the one by hand by {off:.1e}"
