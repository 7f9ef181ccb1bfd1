"""PPO: generalized advantage estimation, the critic, and what it shares with GRPO."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import float64, tiny_gpt, tiny_llama, uniform
from torch import Tensor
from torch.testing import assert_close

from minigrpo.grpo import GRPOConfig, rollout, score
from minigrpo.logprobs import positions_from_mask
from minigrpo.objective import group_advantages, grpo_loss
from minigrpo.sampling import left_pad, sample
from minigrpo.study.ppo import (
    at_the_end,
    critic_of,
    gae,
    ppo_loss,
    state_values,
    train_ppo,
    value_loss,
)

NAN, EOS = math.nan, 10
POLICIES = {"char GPT": tiny_gpt, "Llama": tiny_llama}


def ends_after(lengths: list[int], width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def by_definition(rewards: Tensor, values: Tensor, length: int, lam: float) -> list:
    """sum_k lam^k delta_{t+k} over the tokens that are left, one text."""
    V = [*values[:length].tolist(), 0.0]
    delta = [rewards[t].item() + V[t + 1] - V[t] for t in range(length)]
    return [sum(lam ** (s - t) * delta[s] for s in range(t, length)) for t in range(length)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.floats(0, 1), st.data())
def test_advantages_are_the_sums_of_their_definition(lengths, lam, data):
    shape, seed = (len(lengths), 6), data.draw(st.integers(0, 99))
    mask = ends_after(lengths, 6)
    rewards, values = (uniform(*shape, seed=s).where(mask, NAN) for s in (seed, seed + 100))
    advantages, returns = gae(rewards, values, mask, lam)
    for row, length in enumerate(lengths):
        wanted = by_definition(rewards[row], values[row], length, lam)
        assert_close(advantages[row, :length], float64(*wanted))
        assert_close(returns[row, :length], advantages[row, :length] + values[row, :length])
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_advantages_carry_no_gradient():
    rewards, values = uniform(3, 5), uniform(3, 5, seed=1).requires_grad_()
    found = gae(rewards, values, ends_after([5, 2, 1], 5), lam=0.95)
    assert not any(x.requires_grad for x in found)


@pytest.mark.parametrize(
    ("values", "mask", "message"),
    [
        (torch.zeros(2, 1), torch.ones(2, 3), r"values: expected shape \(2, 3\), got \(2, 1\)"),
        (torch.zeros(2, 3), torch.ones(1, 3), r"mask: expected shape \(2, 3\), got \(1, 3\)"),
        (torch.zeros(2, 3), torch.tensor([[1, 0, 1]] * 2), "mask: expected padding on the right"),
        (torch.zeros(2, 3), torch.tensor([[0, 1, 1]] * 2), "mask: expected padding on the right"),
    ],
)
def test_what_would_broadcast_or_skip_a_token_is_refused(values, mask, message):
    with pytest.raises(ValueError, match=message):
        gae(torch.zeros(2, 3), values, mask, lam=0.95)


def test_the_value_loss_by_hand():
    """Errors -0.5, 0 and 1: (0.25 + 0 + 1) / 3 / 2, and a third of each as the gradient."""
    values = float64([0.5, 0.25], [1, NAN]).requires_grad_()
    returns = float64([1, 0.25], [0, NAN]).requires_grad_()
    loss = value_loss(values, returns, ends_after([2, 1], 2))
    assert_close(loss.item(), 1.25 / 6)
    gradients = torch.autograd.grad(loss, (values, returns), allow_unused=True)
    assert gradients[0] is not None and gradients[1] is None
    assert_close(gradients[0], float64([-0.5, 0], [1, 0]) / 3)


def test_returns_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"returns: expected shape \(2, 3\), got \(2, 1\)"):
        value_loss(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3))


def ragged_rollouts(policy):
    """Answers of several lengths to prompts of two lengths."""
    prompts = left_pad([torch.tensor(p) for p in ([3, 1, 4], [9, 5])])
    settings = {"max_new_tokens": 5, "completions_per_prompt": 4, "eos_id": EOS}
    rollouts = sample(policy, *prompts, generator=torch.Generator().manual_seed(1), **settings)
    assert len(rollouts.completion_mask.sum(dim=1).unique()) > 1
    return rollouts


def some_critic(policy):
    """A critic that says something else in every state."""
    critic = critic_of(policy)
    critic.lm_head.weight.data = uniform(1, 16)
    return critic


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_critic_begins_at_0_and_shares_nothing_with_the_policy(make):
    policy = make()
    before, state = copy.deepcopy(policy.state_dict()), torch.get_rng_state()
    critic = critic_of(policy)
    assert torch.equal(torch.get_rng_state(), state)
    values = state_values(critic, ragged_rollouts(policy))
    assert not values.any()
    for parameter in critic.parameters():
        parameter.data += 1
    assert all(torch.equal(before[name], w) for name, w in policy.state_dict().items())


def test_a_value_has_read_all_that_comes_before_its_token():
    for make in POLICIES.values():
        policy = make()
        critic, r = some_critic(policy), ragged_rollouts(policy)
        values = state_values(critic, r)
        seen = r.attention_mask
        positions = positions_from_mask(seen)
        whole = critic(r.input_ids, attention_mask=seen.long(), position_ids=positions).logits
        before = whole[:, r.prompt_ids.shape[1] - 1 : -1, 0]  # the state before each token
        wanted = torch.where(r.completion_mask, before, 0.0)
        assert_close(values, wanted, atol=1e-5, rtol=1e-5)  # Llama's norms stay in float32
        other = r.completions.clone()
        other[:, 2] = (other[:, 2] + 1) % 10
        changed = state_values(critic, replace(r, completions=other)) != values
        assert not changed[:, :3].any() and changed[:, 3][r.completion_mask[:, 3]].all()


def test_the_reward_of_a_text_comes_with_its_last_token():
    rollouts = ragged_rollouts(tiny_gpt())
    rewards, mask = uniform(8), rollouts.completion_mask
    per_token = at_the_end(rewards, rollouts)
    assert_close(per_token.sum(dim=1), rewards)
    ends = torch.cat([~mask[:, 1:], torch.ones(8, 1, dtype=torch.bool)], dim=1) & mask
    assert torch.equal(per_token != 0, ends)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """New and old log-probs and mask of 2 groups of 3 ragged texts."""
    mask = ends_after([4, 2, 3, 1, 4, 4], 4)
    new, old = -1 - uniform(6, 4, seed=seed), -1 - uniform(6, 4, seed=seed + 1)
    return torch.where(mask, new, NAN).requires_grad_(), torch.where(mask, old, NAN), mask


def loss_and_gradient(loss_of, advantages: Tensor, **settings) -> tuple[Tensor, Tensor]:
    new, old, mask = batch()
    others = {"ref_log_probs": old - 0.3, "entropy": -new, "how": "token_mean"}
    loss, _ = loss_of(new, old, advantages, mask, **others, **settings)
    return loss.detach(), torch.autograd.grad(loss, new)[0]


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize("weights", [{}, {"kl_weight": 0.3, "entropy_weight": 0.2}])
def test_a_critic_that_knows_the_mean_of_each_group_makes_ppo_grpo(weights, surrogate):
    """V = the group's mean, with lam = 1: A_t = reward - mean for every token of a text."""
    rewards, (_, _, mask) = float64(1, 0, 0.5, 0, 0, 2), batch()
    means = rewards.view(2, 3).mean(dim=1).repeat_interleave(3)
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros(6, 1, dtype=torch.bool)], dim=1)
    per_token, values = torch.where(last, rewards[:, None], 0.0), means[:, None].expand(6, 4)
    of_tokens, returns = gae(per_token, values, mask, lam=1.0)
    assert_close(returns[mask], rewards[:, None].expand(6, 4)[mask])
    of_texts = group_advantages(rewards, 3, scale="none")
    ours = loss_and_gradient(ppo_loss, of_tokens, surrogate=surrogate, **weights)
    grpo = loss_and_gradient(grpo_loss, of_texts, surrogate=surrogate, **weights)
    for one, other in zip(ours, grpo):
        assert_close(one, other)


class Threes:
    """A task: write the token 3. The reward is the fraction of them, plus what comes anyway."""

    def __init__(self, anyway: float = 0.0) -> None:
        self.anyway = anyway

    def prompts(self, n, generator):
        return [torch.randint(10, (3,), generator=generator) for _ in range(n)]

    def reward(self, prompts, completions):
        return [self.anyway + (ids == 3).double().mean().item() for ids in completions]


CONFIG = GRPOConfig(
    steps=1, prompts_per_step=2, group_size=8, max_new_tokens=6, how="token_mean", lr=3e-3
)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_step_is_told_by_its_metrics(make):
    policy = make()
    config = replace(CONFIG, eos_id=EOS, inner_epochs=2, kl_weight=0.1, entropy_weight=0.01)
    (metrics,) = train_ppo(policy, critic_of(policy), Threes(), config)
    assert metrics.step == 1 and metrics.advantages.shape == (16,) and metrics.kl is not None
    half = metrics.rewards[:, None].square() / 2  # V = 0: what it should have said is the reward
    wanted = half.expand(16, 6)[ends_after(metrics.rollouts.completion_mask.sum(1).tolist(), 6)]
    (again,) = train_ppo(make(), critic_of(make()), Threes(), config, lam=1.0)
    assert again.evaluation["value_loss"] == pytest.approx(wanted.mean().item())
    assert metrics.table(str, rows=[0]).count("\n") == 1


def test_the_policy_learns_from_rewards_token_by_token():
    """The same total, each part of it when it was earned."""
    policy, config = tiny_gpt(), replace(CONFIG, steps=30)
    earned = lambda rewards, r: (r.completions == 3).to(rewards) / 6  # noqa: E731
    run = train_ppo(policy, critic_of(policy), Threes(), config, per_token=earned)
    rewards = [metrics.reward for metrics in run]
    assert sum(rewards[-5:]) / 5 > 2 * max(sum(rewards[:5]) / 5, 0.1)


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_two_steps_are_those_of_a_loop_written_out(surrogate):
    """Rewards of up to 20, KL, entropy bonus, two epochs, norms that are clipped: same weights."""
    weights = {"kl_weight": 0.3, "estimator": "k2", "kl_correction": True, "entropy_weight": 0.05}
    config = replace(CONFIG, steps=2, inner_epochs=2, surrogate=surrogate, **weights)
    config = replace(config, eos_id=EOS, max_grad_norm=0.05, lr=0.02, clip=(0.1, 0.3))
    ours, policy = tiny_gpt(), tiny_gpt()
    our_critic, critic = critic_of(ours), critic_of(policy)
    list(train_ppo(ours, our_critic, Threes(19.0), config, lam=0.8, critic_lr=0.05))

    policy.eval(), critic.eval()
    reference = copy.deepcopy(policy)
    optimizers = [
        torch.optim.Adam(network.parameters(), lr, config.betas)
        for network, lr in ((policy, 0.02), (critic, 0.05))
    ]
    order, sampling = (torch.Generator().manual_seed(config.seed) for _ in range(2))
    for _ in range(2):
        prompts = Threes().prompts(2, order)
        rollouts, rewards = rollout(policy, Threes(19.0), prompts, config, sampling)
        mask, old = rollouts.completion_mask, rollouts.log_probs
        values = state_values(critic, rollouts).detach()
        A, returns = gae(at_the_end(rewards.to(values), rollouts), values, mask, lam=0.8)
        A = (A - A[mask].mean()) / (A[mask].std() + 1e-4)
        ref = score(reference, rollouts, config)[0].detach()
        for _ in range(2):
            new, entropy = score(policy, rollouts, config)
            ratio = (new - old).exp()
            if surrogate == "clip":
                objective = torch.minimum(ratio * A, ratio.clamp(0.9, 1.3) * A)
            else:
                objective = ratio.clamp(max=1.3).detach() * A * new
            losses = 0.3 * ratio * (new - ref).square() / 2 - objective - 0.05 * entropy
            errors = (state_values(critic, rollouts) - returns).square() / 2
            for network, loss, optimizer in zip((policy, critic), (losses, errors), optimizers):
                optimizer.zero_grad()
                loss[mask].mean().backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 0.05)
                optimizer.step()
    for one, other in ((ours, policy), (our_critic, critic)):
        for mine, theirs in zip(one.parameters(), other.parameters()):
            assert_close(mine, theirs, atol=1e-7, rtol=1e-5)
