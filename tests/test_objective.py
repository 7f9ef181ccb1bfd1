"""The objective, from rewards to the loss: value and gradient against hand numbers and loops.

The references here are plain Python on floats; the gradients are their central differences.
"""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support import (
    AVERAGES,
    BASELINES,
    ESTIMATORS,
    GARBAGE,
    LEVELS,
    SCALES,
    SURROGATES,
    float64,
    must_fail_on,
    ragged_masks,
    uniform,
)
from torch import Tensor
from torch.testing import assert_close

from minigrpo.objective import (
    ADVANTAGE_SETTINGS,
    VARIANTS,
    _ratio_metrics,
    aggregate,
    clipped_surrogate,
    equal_groups,
    group_advantages,
    grpo_loss,
    kl_estimate,
    policy_ratio,
)

# Lines of the objective that are replaced below.
Rows = list[list[float]]

NAN, INF = math.nan, math.inf


# ---------------------------------------------------------------------------------------------
# policy_ratio


def ratio_by_loops(log_probs: Tensor, old: Tensor, mask: Tensor, level: str) -> Tensor:
    """The definition, one token at a time."""
    rows = []
    for new_row, old_row, keep in zip(log_probs, old, mask):
        ratios = [math.exp(n - o) for n, o, real in zip(new_row, old_row, keep) if real]
        if level == "token":
            real = iter(ratios)
            rows.append([next(real) if kept else 1.0 for kept in keep])
        elif level == "sequence":
            rows.append([math.prod(ratios)])
        else:
            rows.append([math.prod(ratios) ** (1 / len(ratios))])
    return torch.tensor(rows, dtype=torch.float64)


@must_fail_on(
    "geometric_ratio_divides_by_the_width",
    (
        policy_ratio,
        "total = log_ratio.sum(dim=-1, keepdim=True)",
        "total = log_ratio.mean(-1)[:, None]",
    ),
)
@given(ragged_masks())
def test_every_level_equals_its_definition(mask):
    new, old = uniform(*mask.shape, seed=1), uniform(*mask.shape, seed=2)
    for level in LEVELS:
        ratio = policy_ratio(new, old, mask, level=level)
        assert_close(ratio, ratio_by_loops(new, old, mask, level))


@must_fail_on("old_over_new")
def test_the_ratio_is_new_over_old():
    new, old = torch.tensor([[0.6, 0.2]]).log(), torch.tensor([[0.2, 0.4]]).log()
    assert_close(policy_ratio(new, old, torch.ones(1, 2)), torch.tensor([[3.0, 0.5]]))


@must_fail_on(
    "mask_by_multiplication",
)
@given(ragged_masks(), GARBAGE, GARBAGE)
def test_nothing_comes_from_under_the_mask(mask, garbage, old_garbage):
    new, old = uniform(*mask.shape, seed=1), uniform(*mask.shape, seed=2)
    garbled = new.masked_fill(~mask, garbage).requires_grad_()
    old_garbled = old.masked_fill(~mask, old_garbage)
    new.requires_grad_()
    for level in LEVELS:
        clean = policy_ratio(new, old, mask, level=level)
        ratio = policy_ratio(garbled, old_garbled, mask, level=level)
        assert torch.equal(ratio, clean)
        (expected,) = torch.autograd.grad(clean.pow(2).sum(), new)
        (gradient,) = torch.autograd.grad(ratio.pow(2).sum(), garbled)
        assert torch.equal(gradient, expected)


@given(ragged_masks(), st.sampled_from(LEVELS))
def test_the_gradient_is_that_of_the_definition(mask, level):
    new, old = uniform(*mask.shape, seed=1).requires_grad_(), uniform(*mask.shape, seed=2)
    policy_ratio(new, old, mask, level=level).sum().backward()
    ratio = ratio_by_loops(new.detach(), old, mask, level)
    share = 1 / mask.sum(dim=1, keepdim=True) if level == "geometric" else 1.0
    assert_close(new.grad, ratio * share * mask)


@must_fail_on("ratio_detached")
@given(ragged_masks())
def test_identical_policies_have_ratio_one_and_a_gradient(mask):
    for level in LEVELS:
        log_probs = uniform(*mask.shape).requires_grad_()
        ratio = policy_ratio(log_probs, log_probs.detach(), mask, level=level)
        assert torch.equal(ratio, torch.ones_like(ratio))
        assert ratio.requires_grad
        ratio.sum().backward()
        share = 1 / mask.sum(dim=1, keepdim=True) if level == "geometric" else 1.0
        assert_close(log_probs.grad, mask * torch.as_tensor(share, dtype=torch.float64))


def test_a_geometric_ratio_does_not_grow_with_the_length():
    new = torch.full((1, 1000), math.log(1.1), dtype=torch.float64)
    old = torch.zeros_like(new)
    mask = torch.ones(1, 1000)
    assert_close(policy_ratio(new, old, mask, level="geometric").item(), 1.1)
    assert_close(policy_ratio(new, old, mask, level="sequence").item(), 1.1**1000)


ROW = torch.zeros(1, 2)


def test_an_unknown_level_is_refused():
    message = "level: expected one of token, sequence, geometric, got 'gspo'"
    with pytest.raises(ValueError, match=message):
        policy_ratio(ROW, ROW, ROW + 1, level="gspo")


@pytest.mark.parametrize(
    ("log_probs", "old_log_probs", "name"),
    [(ROW.long(), ROW, "log_probs"), (ROW, ROW.long(), "old_log_probs")],
    ids=["new", "old"],
)
def test_whole_numbers_are_no_log_probs(log_probs, old_log_probs, name):
    with pytest.raises(TypeError, match=f"^{name}: expected floating point, got torch.int64"):
        policy_ratio(log_probs, old_log_probs, ROW + 1)


def test_policies_that_scored_other_shapes_are_refused():
    message = r"old_log_probs: expected shape \(1, 2\), got \(1, 1\)"
    with pytest.raises(ValueError, match=message):
        policy_ratio(ROW, ROW[:, :1], ROW + 1)


@pytest.mark.parametrize("level", LEVELS)
def test_masks_that_do_not_fit_are_refused(level):
    with pytest.raises(ValueError, match=r"mask: expected shape \(1, 2\), got \(2, 2\)"):
        policy_ratio(ROW, ROW, torch.ones(2, 2), level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_without_a_token_has_ratio_one(level):
    assert policy_ratio(ROW + 1, ROW, ROW, level=level).eq(1).all()


# ---------------------------------------------------------------------------------------------
# group_advantages


def advantages_by_loops(rewards, group_size, scale="group", baseline="mean", eps=1e-4):
    """The definition, one completion at a time, with the standard library's mean and stdev."""
    advantages = []
    for i, reward in enumerate(rewards):
        first = i - i % group_size
        group = rewards[first : first + group_size]
        others = [r for j, r in enumerate(rewards) if first <= j < first + group_size and j != i]
        advantage = reward - statistics.fmean(group if baseline == "mean" else others)
        if scale != "none":
            advantage /= statistics.stdev(group if scale == "group" else rewards) + eps
        advantages.append(advantage)
    return float64(*advantages)


@st.composite
def reward_groups(draw: st.DrawFn) -> tuple[list[float], int]:
    """Rewards in quarters, so that equal ones and equal groups are likely, and the group size."""
    size = draw(st.integers(2, 5))
    count = size * draw(st.integers(1, 4))
    rewards = st.lists(st.integers(-8, 8), min_size=count, max_size=count)
    return [r / 4 for r in draw(rewards)], size


@must_fail_on(
    "population_std",
    (
        group_advantages,
        "advantages = advantages / (groups.std() + eps)",
        "advantages = (groups - groups.mean()) / (groups.std() + eps)",
    ),
    (
        group_advantages,
        "advantages = advantages * (group_size / (group_size - 1))",
        "advantages = advantages * ((group_size - 1) / group_size)",
    ),
)
@given(reward_groups())
def test_advantages_equal_their_definition(rewards_and_size):
    rewards, size = rewards_and_size
    assume(len(set(rewards)) > 1)
    for scale, baseline, eps in itertools.product(SCALES, BASELINES, (1e-4, 0.5)):
        advantages = group_advantages(
            float64(*rewards), size, scale=scale, baseline=baseline, eps=eps
        )
        assert_close(advantages, advantages_by_loops(rewards, size, scale, baseline, eps))


HIT = (63 / 64) / (1 / 8 + 1e-4)  # one hit in 64: the mean is 1/64, the sample std exactly 1/8
MISS = (-1 / 64) / (1 / 8 + 1e-4)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0], [0.70700679, -0.70700679]),
        ([1, 0, 0, 0], [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        ([1, 0, 1, 1], [0.25 / 0.5001, -0.75 / 0.5001, 0.25 / 0.5001, 0.25 / 0.5001]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([0] * 63 + [1], [MISS] * 63 + [HIT]),
    ],
    ids=["1 0", "1 0 0 0", "1 0 1 1", "all 0", "all 1", "one hit in 64"],
)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.int64, torch.bool], ids=str
)
def test_advantages_by_hand(rewards, expected, dtype):
    advantages = group_advantages(torch.tensor(rewards, dtype=dtype), len(rewards))
    assert advantages.dtype == (dtype if dtype.is_floating_point else torch.float32)
    tolerance = {torch.float64: 1e-7, torch.float16: 2e-3}.get(dtype, 1e-6)
    assert_close(advantages.double(), float64(*expected), rtol=tolerance, atol=0)


def test_the_three_scales_and_the_two_baselines_by_hand():
    rewards = float64(1, 0, 4, 2)  # groups (1, 0) and (4, 2); std of all four: sqrt(35 / 12)
    expected = {
        "group": [0.5**0.5, -(0.5**0.5), 0.5**0.5, -(0.5**0.5)],
        "batch": [(12 / 35) ** 0.5 * a for a in (0.5, -0.5, 1, -1)],
        "none": [0.5, -0.5, 1, -1],
    }
    for scale, advantages in expected.items():
        ours = group_advantages(rewards, 2, scale=scale, eps=0)
        assert_close(ours, float64(*advantages))
        ours = group_advantages(rewards, 2, scale=scale, eps=0, baseline="leave_one_out")
        assert_close(ours, 2 * float64(*advantages))  # G / (G - 1) = 2


@must_fail_on(
    "equal_rewards_not_exactly_zero",
)
def test_equal_rewards_have_advantages_of_exactly_zero():
    for rewards in (torch.full((16,), 5.7), float64(0.1, 0.1, 0.1), float64(*[1 / 3] * 7)):
        for scale, baseline, eps in itertools.product(SCALES, BASELINES, (1e-4, 0.0)):
            advantages = group_advantages(
                rewards, len(rewards), scale=scale, baseline=baseline, eps=eps
            )
            assert torch.equal(advantages, torch.zeros_like(rewards))


@must_fail_on(
    "groups_mix_prompts",
    "mean_over_the_batch",
)
@given(reward_groups(), st.floats(-100, 100))
def test_groups_never_mix_prompts(rewards_and_size, other):
    rewards, size = rewards_and_size
    assume(len(rewards) > size)
    changed = float64(*rewards)
    changed[size:] = changed[size:] * 3 + other
    for scale, baseline in itertools.product(("group", "none"), BASELINES):
        before = group_advantages(float64(*rewards), size, scale=scale, baseline=baseline)
        after = group_advantages(changed, size, scale=scale, baseline=baseline)
        assert torch.equal(after[:size], before[:size])


@given(reward_groups(), st.floats(-10, 10))
def test_a_shift_of_all_rewards_changes_nothing(rewards_and_size, shift):
    rewards, size = rewards_and_size
    for scale, baseline in itertools.product(SCALES, BASELINES):
        advantages = group_advantages(float64(*rewards), size, scale=scale, baseline=baseline)
        shifted = group_advantages(float64(*rewards) + shift, size, scale=scale, baseline=baseline)
        assert_close(shifted, advantages, rtol=1e-6, atol=1e-9)
        if baseline == "mean":
            assert_close(advantages.view(-1, size).sum(dim=1).abs().max().item(), 0.0)


def test_without_a_baseline_the_advantage_is_the_reward():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.1, 0.1])
    advantages = group_advantages(rewards, 2, scale="none", baseline="none")
    assert torch.equal(advantages, rewards)
    whole = group_advantages(torch.tensor([1, 0]), 2, scale="none", baseline="none")
    assert whole.tolist() == [1.0, 0.0] and whole.dtype == torch.get_default_dtype()
    for scale in ("group", "batch"):
        with pytest.raises(ValueError, match=f"^scale: expected 'none' .*, got '{scale}'$"):
            group_advantages(rewards, 2, scale=scale, baseline="none")


@given(reward_groups(), st.floats(0.1, 100))
def test_a_positive_factor_changes_nothing_but_the_share_of_eps(rewards_and_size, factor):
    rewards, size = rewards_and_size
    for scale in ("group", "batch"):
        exact = group_advantages(float64(*rewards), size, scale=scale, eps=0)
        scaled = group_advantages(factor * float64(*rewards), size, scale=scale, eps=0)
        assert_close(scaled, exact)
        # Two different rewards in quarters among 20 have a std of 0.05 or more, and eps adds
        # 1e-4 to a tenth of that at worst.
        scaled = group_advantages(factor * float64(*rewards), size, scale=scale)
        assert_close(scaled, exact, rtol=1e-4 / 0.005, atol=0)
    plain = group_advantages(float64(*rewards), size, scale="none")
    scaled = group_advantages(factor * float64(*rewards), size, scale="none")
    assert_close(scaled, factor * plain)


@given(reward_groups())
def test_equal_groups_are_those_without_a_difference(rewards_and_size):
    rewards, size = rewards_and_size
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    equal = equal_groups(float64(*rewards), size)
    assert equal.dtype == torch.bool
    assert equal.tolist() == [len(set(group)) == 1 for group in groups]


def test_equal_means_equal_to_the_last_bit():
    assert equal_groups(torch.full((16,), 5.7), 16).tolist() == [True]
    assert equal_groups(torch.tensor([1, 1, 0, 1]), 2).tolist() == [True, False]
    assert equal_groups(float64(5.7, math.nextafter(5.7, 6.0)), 2).tolist() == [False]


# ---------------------------------------------------------------------------------------------
# kl_estimate


@pytest.mark.parametrize(
    ("p", "q", "estimator", "value", "slope"),
    [
        (0.5, 0.25, "k1", math.log(2), 1.0),
        (0.5, 0.25, "k2", math.log(2) ** 2 / 2, math.log(2)),
        (0.5, 0.25, "k3", math.log(2) - 0.5, 0.5),
        (0.25, 0.5, "k1", -math.log(2), 1.0),
        (0.25, 0.5, "k2", math.log(2) ** 2 / 2, -math.log(2)),
        (0.25, 0.5, "k3", 1 - math.log(2), -1.0),
        (0.25, 0.25, "k1", 0.0, 1.0),
        (0.25, 0.25, "k2", 0.0, 0.0),
        (0.25, 0.25, "k3", 0.0, 0.0),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value:.3g}",
)
def test_the_estimators_by_hand(p, q, estimator, value, slope):
    """A token of probability p under the policy and q under the reference."""
    log_p, log_q = float64(math.log(p)).requires_grad_(), float64(math.log(q))
    kl = kl_estimate(log_p, log_q, estimator=estimator)
    assert_close(kl, float64(value))
    (gradient,) = torch.autograd.grad(kl.sum(), log_p)
    assert_close(gradient, float64(slope))


def test_k1_and_k3_have_the_mean_of_the_divergence():
    """KL of (0.5, 0.5) from (0.25, 0.75): 0.5 ln 2 + 0.5 ln 2/3 = 0.5 ln 4/3."""
    log_p, log_q = float64(0.5, 0.5).log(), float64(0.25, 0.75).log()
    for estimator in ("k1", "k3"):
        mean = kl_estimate(log_p, log_q, estimator=estimator).mean()
        assert_close(mean.item(), 0.5 * math.log(4 / 3))
    assert kl_estimate(log_p, log_q, estimator="k1")[1] < 0  # k1 is negative for some tokens


@given(st.floats(-30, 30))
def test_k2_and_k3_are_never_negative(d):
    for estimator in ("k2", "k3"):
        assert kl_estimate(float64(d), float64(0.0), estimator=estimator) >= 0


@must_fail_on(
    (
        kl_estimate,
        'return {"k1": d, "k2": d.square() / 2, "k3": torch.expm1(-d) + d}[estimator]',
        "return torch.exp(-d) - 1 + d",
    ),
)
def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    near = kl_estimate(torch.tensor([1e-4, -1e-4]), torch.zeros(2))
    assert_close(near, torch.full((2,), 5e-9), rtol=0.01, atol=0)


# ---------------------------------------------------------------------------------------------
# clipped_surrogate

SURROGATE = [  # ratio, advantage, value, slope; the ratio is kept within 0.8 and 1.25
    (0.5, 2.0, 1.0, 2.0),
    (0.9, 2.0, 1.8, 2.0),
    (1.0, 2.0, 2.0, 2.0),
    (1.2, 2.0, 2.4, 2.0),
    (1.3, 2.0, 2.5, 0.0),
    (1.5, 2.0, 2.5, 0.0),
    (0.5, -2.0, -1.6, 0.0),
    (0.7, -2.0, -1.6, 0.0),
    (0.9, -2.0, -1.8, -2.0),
    (1.0, -2.0, -2.0, -2.0),
    (1.3, -2.0, -2.6, -2.0),
    (1.5, -2.0, -3.0, -2.0),
    (0.5, 0.0, 0.0, 0.0),
    (1.5, 0.0, 0.0, 0.0),
]


@must_fail_on(
    "clip_low_and_high_swapped",
    "clamp_without_min",
)
def test_the_surrogate_by_hand():
    for number, advantage, value, slope in SURROGATE:
        ratio = float64(number).requires_grad_()
        surrogate = clipped_surrogate(ratio, float64(advantage), (0.2, 0.25))
        assert_close(surrogate, float64(value))
        (gradient,) = torch.autograd.grad(surrogate.sum(), ratio)
        assert_close(gradient, float64(slope))


def test_one_advantage_serves_a_whole_row():
    surrogate = clipped_surrogate(float64([0.5, 1.5], [0.5, 1.5]), float64([1], [-1]), (0.2, 0.2))
    assert_close(surrogate, float64([0.5, 1.2], [-0.8, -1.5]))


# ---------------------------------------------------------------------------------------------
# aggregate


def average_by_loops(rows: Rows, how: str, max_length: int | None = None) -> float:
    """rows holds the real tokens only."""
    tokens = [token for row in rows for token in row]
    if how == "sequence_mean":
        return statistics.fmean(statistics.fmean(row) if row else 0.0 for row in rows)
    if how == "token_mean":
        return statistics.fmean(tokens) if tokens else 0.0
    return math.fsum(tokens) / (len(rows) * max_length)


def masks(min_rows: int = 1, max_rows: int = 4) -> st.SearchStrategy[Tensor]:
    """Any mask (N, T), rows without a real token included."""
    return st.integers(1, 5).flatmap(
        lambda columns: st.lists(
            st.lists(st.booleans(), min_size=columns, max_size=columns),
            min_size=min_rows,
            max_size=max_rows,
        ).map(torch.tensor)
    )


# One token of 10, and four of mean 2.5: (10 + 2.5) / 2, then 20 / 5, then 20 / (2 * 4).
AVERAGED = {
    "sequence_mean": (6.25, [[1 / 2, 0, 0, 0], [1 / 8, 1 / 8, 1 / 8, 1 / 8]]),
    "token_mean": (4.0, [[1 / 5, 0, 0, 0], [1 / 5, 1 / 5, 1 / 5, 1 / 5]]),
    "constant": (2.5, [[1 / 8, 0, 0, 0], [1 / 8, 1 / 8, 1 / 8, 1 / 8]]),
}


@pytest.mark.parametrize("how", AVERAGES)
@pytest.mark.parametrize("under", [0.0, 7.0, NAN, INF, 1e30])
def test_three_averages_of_the_same_tokens(how, under):
    per_token = float64([10, under, under, under], [1, 2, 3, 4]).requires_grad_()
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    value, slopes = AVERAGED[how]
    average = aggregate(per_token, mask, how=how, max_length=4)
    assert average.shape == ()
    assert_close(average.item(), value)
    (gradient,) = torch.autograd.grad(average, per_token)
    assert_close(gradient, float64(*slopes))


def test_on_a_full_mask_the_three_averages_are_one():
    per_token = float64([10, 0, 2, 0], [1, 2, 3, 6])
    for how in AVERAGES:
        assert_close(aggregate(per_token, torch.ones(2, 4), how=how, max_length=4).item(), 3.0)


def test_a_masked_row_stays_in_the_number_of_rows():
    per_token = float64([10, NAN, NAN, NAN], [1, 2, 3, 4], [NAN, NAN, NAN, NAN])
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    expected = {"sequence_mean": 12.5 / 3, "token_mean": 4.0, "constant": 20 / 12}
    for how, value in expected.items():
        assert_close(aggregate(per_token, mask, how=how, max_length=4).item(), value)


def test_the_constant_is_not_the_width():
    per_token, mask = float64([10, 0, 0], [1, 2, 3]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    assert_close(aggregate(per_token, mask, how="constant", max_length=8).item(), 1.0)


@given(masks(), st.sampled_from([torch.bool, torch.int64, torch.float32]))
def test_every_average_equals_its_definition(mask, dtype):
    per_token = uniform(*mask.shape)
    rows = [[x.item() for x, real in zip(*row) if real] for row in zip(per_token, mask)]
    for how in AVERAGES:
        average = aggregate(per_token, mask.to(dtype), how=how, max_length=7)
        assert_close(average.item(), average_by_loops(rows, how, 7))


# ---------------------------------------------------------------------------------------------
# grpo_loss: the reference


def ratios_of_a_row(log_ratios: list[float], level: str) -> list[float]:
    """One per token, also where the tokens share it."""
    product = math.prod(math.exp(x) for x in log_ratios)
    if level == "token":
        return [math.exp(x) for x in log_ratios]
    if level == "sequence":
        return [product] * len(log_ratios)
    return [product ** (1 / len(log_ratios))] * len(log_ratios)


def terms_by_loops(new: Rows, old: Rows | None, mask: Rows, frozen: Rows, level: str):
    """Per row, its real tokens as (column, ratio, the ratio that counts as a constant)."""
    old = frozen if old is None else old
    for new_row, old_row, frozen_row, keep in zip(new, old, frozen, mask):
        real = [t for t, kept in enumerate(keep) if kept]
        if not real:
            yield []
            continue
        ratios = ratios_of_a_row([new_row[t] - old_row[t] for t in real], level)
        weights = ratios_of_a_row([frozen_row[t] - old_row[t] for t in real], level)
        yield list(zip(real, ratios, weights))


def loss_by_loops(
    new: Rows,
    old: Rows | None,
    advantages: list[float],
    mask: Rows,
    *,
    frozen: Rows,
    ref_log_probs: Rows | None = None,
    level: str = "token",
    clip: tuple[float, float] = (0.2, 0.2),
    surrogate: str = "clip",
    how: str = "sequence_mean",
    max_length: int | None = None,
    kl_weight: float = 0.0,
    estimator: str = "k3",
    kl_correction: bool = False,
    entropy: Rows | None = None,
    entropy_weight: float = 0.0,
) -> tuple[float, dict[str, float]]:
    """The loss, one token at a time, and the metrics that are averages over tokens.

    `frozen` are the log-probs behind all that counts as a constant: cispo's weight, and the old
    policy if there is none. Differences in `new` alone are then the gradient.
    """
    low, high = clip
    policy_rows, kl_rows, entropies = [], [], []
    for n, terms in enumerate(terms_by_loops(new, old, mask, frozen, level)):
        A = advantages[n]
        policy_rows.append([])
        kl_rows.append([])
        for t, ratio, weight in terms:
            if surrogate == "cispo":
                objective = min(weight, 1 + high) * A * new[n][t]
            elif A > 0:  # nothing to gain above 1 + high
                objective = A * min(ratio, 1 + high)
            else:  # nothing to gain below 1 - low
                objective = A * max(ratio, 1 - low)
            policy_rows[n].append(-objective)
            if ref_log_probs is not None:
                p, q = new[n][t], ref_log_probs[n][t]
                kl = {
                    "k1": p - q,
                    "k2": (p - q) * (p - q) / 2,
                    "k3": math.exp(q) / math.exp(p) - 1 - (q - p),
                }[estimator]
                kl_rows[n].append(kl * ratio if kl_correction else kl)
            if entropy is not None:
                entropies.append(entropy[n][t])
    policy_loss = average_by_loops(policy_rows, how, max_length)
    loss, metrics = policy_loss, {"policy_loss": policy_loss}
    if ref_log_probs is not None:
        loss += kl_weight * average_by_loops(kl_rows, how, max_length)
        metrics["kl"] = average_by_loops(kl_rows, "token_mean")
    if entropy is not None:
        metrics["entropy"] = average_by_loops([entropies], "token_mean")
        loss -= entropy_weight * metrics["entropy"]
    return loss, metrics


def central_differences(function: Callable[[Rows], float], rows: Rows, h: float = 1e-5) -> Tensor:
    """The gradient of a function of plain numbers."""
    slopes = []
    for n, row in enumerate(rows):
        slopes.append([])
        for t in range(len(row)):
            ends = []
            for step in (h, -h):
                moved = [list(other) for other in rows]
                moved[n][t] += step
                ends.append(function(moved))
            slopes[n].append((ends[0] - ends[1]) / (2 * h))
    return float64(*slopes)


def a_batch(mask: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """All that grpo_loss takes, between plausible bounds, for a mask."""
    new = uniform(*mask.shape, seed=seed) - 1.2
    return {
        "log_probs": new,
        "old_log_probs": new + 0.7 * uniform(*mask.shape, seed=seed + 1),
        "advantages": uniform(len(mask), seed=seed + 2) * 2,
        "completion_mask": mask,
        "ref_log_probs": new + 0.5 * uniform(*mask.shape, seed=seed + 3),
        "entropy": uniform(*mask.shape, seed=seed + 4) + 1.5,
    }


def plain_numbers(batch: dict[str, Tensor | None]) -> tuple[list, dict]:
    """The four positional arguments and the others, as lists."""
    plain = {name: None if x is None else x.tolist() for name, x in batch.items()}
    first = ("log_probs", "old_log_probs", "advantages", "completion_mask")
    return [plain.pop(name) for name in first], plain


def loss_and_gradients(batch: dict, **settings) -> tuple[Tensor, dict, Tensor, Tensor | None]:
    """The loss, its metrics, and the gradients of log_probs and entropy (None: nothing flows)."""
    batch = dict(batch)
    batch["log_probs"] = batch["log_probs"].clone().requires_grad_()
    if batch.get("entropy") is not None:
        batch["entropy"] = batch["entropy"].clone().requires_grad_()
    loss, metrics = grpo_loss(**batch, **settings)
    loss.backward()
    entropy_gradient = None if batch.get("entropy") is None else batch["entropy"].grad
    return loss.detach(), metrics, batch["log_probs"].grad, entropy_gradient


SETTINGS = st.fixed_dictionaries(
    {
        "level": st.sampled_from(LEVELS),
        "surrogate": st.sampled_from(SURROGATES),
        "how": st.sampled_from(AVERAGES),
        "estimator": st.sampled_from(ESTIMATORS),
        "kl_correction": st.booleans(),
        "kl_weight": st.sampled_from([0.0, 0.3]),
        "entropy_weight": st.sampled_from([0.0, 0.7]),
        "clip": st.sampled_from([(0.2, 0.2), (0.1, 0.3), (3e-4, 4e-4), (0.0, 4.0), (1.5, 0.0)]),
        "max_length": st.just(7),
    }
)

# ---------------------------------------------------------------------------------------------
# grpo_loss: value and gradient

# Rows far above and far below the clip, of both signs, one in between, and one without a token.
# Row by row, so that the three levels meet both sides too; holes, so that order cannot matter.
MASK = torch.tensor(
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
)
LOG_RATIO = float64([0.5], [-0.5], [0.6], [-0.6], [0.04], [0.0]) + 0.2 * uniform(6, 4, seed=8)
BATCH = {
    **a_batch(MASK, seed=3),
    "advantages": float64(1.2, 0.7, -0.9, -1.1, 0.4, 2.0),
}
BATCH["old_log_probs"] = BATCH["log_probs"] - LOG_RATIO
CLIP = (0.2, 0.28)


@pytest.mark.parametrize("level", LEVELS)
def test_the_batch_has_every_case_and_stands_away_from_the_kinks(level):
    """Otherwise the tests below would compare less than they say."""
    rows = [BATCH[name].tolist() for name in ("log_probs", "old_log_probs")]
    cases = set()
    terms = terms_by_loops(*rows, MASK.tolist(), rows[0], level)
    for A, row in zip(BATCH["advantages"].tolist(), terms):
        for _, ratio, _ in row:
            assert min(abs(ratio - (1 - CLIP[0])), abs(ratio - (1 + CLIP[1]))) > 0.005
            side = "below" if ratio < 1 - CLIP[0] else "above" if ratio > 1 + CLIP[1] else "in"
            cases.add((side, A > 0))
    expected = {(side, sign) for side in ("below", "above") for sign in (True, False)}
    assert cases >= expected | {("in", True)}


@pytest.mark.parametrize("how", AVERAGES)
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_and_its_gradient_equal_the_loops(level, surrogate, how):
    for estimator, correction, first, weights in itertools.product(
        ESTIMATORS, (False, True), (False, True), [(0.3, 0.7), (0.3, 0.0), (0.0, 0.7)]
    ):
        equals_the_loops(
            dict(BATCH, old_log_probs=None) if first else BATCH,
            level=level,
            surrogate=surrogate,
            how=how,
            clip=CLIP,
            max_length=9,
            estimator=estimator,
            kl_correction=correction,
            kl_weight=weights[0],
            entropy_weight=weights[1],
        )


def equals_the_loops(batch: dict, **settings) -> None:
    (new, old, A, mask), rest = plain_numbers(batch)
    rest.update(settings)

    def by_policy(rows: Rows) -> float:
        return loss_by_loops(rows, old, A, mask, frozen=new, **rest)[0]

    def by_entropy(rows: Rows) -> float:
        return loss_by_loops(new, old, A, mask, frozen=new, **(rest | {"entropy": rows}))[0]

    loss, _, gradient, entropy_gradient = loss_and_gradients(batch, **settings)
    assert_close(loss.item(), by_policy(new), rtol=1e-12, atol=1e-12)
    assert_close(gradient, central_differences(by_policy, new), rtol=1e-7, atol=1e-8)
    if settings["entropy_weight"]:
        expected = central_differences(by_entropy, rest["entropy"])
        assert_close(entropy_gradient, expected, rtol=1e-7, atol=1e-8)
    else:
        assert entropy_gradient is None


@must_fail_on(
    "masked_row_divides_by_zero",
    "mask_in_the_denominator_only",
)
@given(masks(), SETTINGS, st.integers(0, 99), st.booleans())
def test_on_any_mask_the_loss_equals_the_loops(mask, settings, seed, first):
    batch = a_batch(mask, seed)
    if first:
        batch["old_log_probs"] = None
    (new, old, A, rows), rest = plain_numbers(batch)
    expected, measured = loss_by_loops(new, old, A, rows, frozen=new, **rest, **settings)
    loss, metrics = grpo_loss(**batch, **settings)
    assert_close(loss.item(), expected)
    for name, value in measured.items():
        assert_close(metrics[name], value)


@given(masks(), SETTINGS, st.integers(0, 99))
def test_autograd_agrees_with_differences_of_the_loss_itself(mask, settings, seed):
    """Wherever nothing is held constant, and no ratio is near the clip."""
    settings = {**settings, "surrogate": "clip", "clip": (0.9, 30.0)}
    batch = a_batch(mask, seed)
    log_probs, entropy = batch.pop("log_probs"), batch.pop("entropy")

    def loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return grpo_loss(log_probs, entropy=entropy, **batch, **settings)[0]

    ratio = (log_probs - batch["old_log_probs"]).masked_fill(~mask, 0.0)
    assume(ratio.sum(dim=1).abs().max() < 2)
    inputs = (log_probs.requires_grad_(), entropy.requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)


@given(masks(), SETTINGS, st.integers(0, 99))
def test_without_old_log_probs_the_old_policy_is_the_new_one(mask, settings, seed):
    batch = a_batch(mask, seed)
    same = dict(batch, old_log_probs=batch["log_probs"].clone())
    none = dict(batch, old_log_probs=None)
    for one, other in zip(
        loss_and_gradients(none, **settings), loss_and_gradients(same, **settings)
    ):
        assert one == other if isinstance(one, dict) or one is None else torch.equal(one, other)


def test_the_first_update_by_hand():
    """Ratio 1 and advantages that cancel: the loss is 0, and its gradient is not."""
    log_probs = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss, metrics = grpo_loss(log_probs, None, float64(1.5, -1.5), mask)
    loss.backward()
    assert_close(loss.item(), 0.0)
    assert_close(log_probs.grad, float64([-0.75, 0, 0], [0.25, 0.25, 0.25]))
    assert metrics["ratio/min"] == metrics["ratio/mean"] == metrics["ratio/max"] == 1.0


def test_a_token_that_has_become_impossible_has_ratio_zero():
    """Only a sampled token of probability 0 is an error (`REFUSED`)."""
    log_probs, old = float64([-1.0, -INF]), float64([-1.0, -1.0])
    loss, metrics = grpo_loss(log_probs, old, float64(1), torch.ones(1, 2))
    assert_close(loss.item(), -0.5)
    assert metrics["ratio/min"] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [(0.5, 1, -0.5), (2, 1, -1.5), (0.5, -1, 0.5), (2, -1, 1.5), (1.2, 2, -2.4)],
)
def test_the_weight_of_cispo_is_a_constant(ratio, advantage, slope):
    """Capped at 1.5 above, not at all below, and no token loses its gradient."""
    batch = {
        "log_probs": float64([-2.0]),
        "old_log_probs": float64([-2.0 - math.log(ratio)]),
        "advantages": float64(advantage),
        "completion_mask": torch.ones(1, 1),
    }
    loss, _, gradient, _ = loss_and_gradients(batch, surrogate="cispo", clip=(0.2, 0.5))
    assert_close(loss.item(), -2.0 * slope)
    assert_close(gradient.item(), float(slope))


@must_fail_on(
    "advantages_not_detached",
    "old_log_probs_not_detached",
    (
        grpo_loss,
        'ref = _real("ref_log_probs", ref_log_probs, mask).detach()',
        'ref = _real("ref_log_probs", ref_log_probs, mask)',
    ),
)
def test_only_the_policy_and_its_entropy_receive_a_gradient():
    for surrogate in SURROGATES:
        batch = {name: values.clone() for name, values in BATCH.items()}
        for name, values in batch.items():
            values.requires_grad_(name != "completion_mask")
        loss, _ = grpo_loss(
            **batch, surrogate=surrogate, kl_weight=0.3, kl_correction=True, entropy_weight=0.7
        )
        loss.backward()
        for name in ("old_log_probs", "ref_log_probs", "advantages"):
            assert batch[name].grad is None
        for name in ("log_probs", "entropy"):
            assert batch[name].grad.abs().sum() > 0


# ---------------------------------------------------------------------------------------------
# grpo_loss: what lies under the mask


@must_fail_on(
    "mask_by_multiplication",
    "padding_read",
)
@given(masks(), SETTINGS, st.lists(GARBAGE, min_size=4, max_size=4), st.booleans())
def test_the_loss_never_reads_what_is_masked(mask, settings, garbage, first):
    clean = a_batch(mask)
    garbled = dict(clean)
    for name, number in zip(("log_probs", "old_log_probs", "ref_log_probs", "entropy"), garbage):
        garbled[name] = clean[name].masked_fill(~mask, number)
    if first:
        clean["old_log_probs"] = garbled["old_log_probs"] = None
    try:
        results = [loss_and_gradients(batch, **settings) for batch in (clean, garbled)]
    except ValueError:
        raise AssertionError("the check for NaN read what is masked") from None
    for one, other in zip(*results):
        assert one == other if isinstance(one, dict) or one is None else torch.equal(one, other)
    assert results[0][2][~mask].eq(0).all()  # and nothing flows there


@given(SETTINGS, st.booleans())
def test_a_batch_without_a_token_has_loss_zero(settings, first):
    batch = {name: torch.full((2, 3), NAN) for name in ("log_probs", "ref_log_probs", "entropy")}
    batch["old_log_probs"] = None if first else torch.full((2, 3), INF)
    batch |= {"advantages": torch.tensor([1.0, -1.0]), "completion_mask": torch.zeros(2, 3)}
    loss, metrics, gradient, _ = loss_and_gradients(batch, **settings)
    assert loss == 0
    assert torch.equal(gradient, torch.zeros(2, 3))
    expected = dict.fromkeys(metrics, 0.0) | {"ratio/min": 1, "ratio/mean": 1, "ratio/max": 1}
    assert metrics == expected


def test_a_row_without_a_token_only_counts():
    """A sixth row of MASK has no token: without it the mean over rows is 6 / 5 as large."""
    factor = {"sequence_mean": 6 / 5, "token_mean": 1.0, "constant": 6 / 5}
    shorter = {name: values[:5] for name, values in BATCH.items()}
    for level, how in itertools.product(LEVELS, AVERAGES):
        settings = dict(level=level, how=how, max_length=9, kl_weight=0.3)
        loss, _, gradient, _ = loss_and_gradients(BATCH, **settings)
        expected, _, expected_gradient, _ = loss_and_gradients(shorter, **settings)
        assert_close(loss * factor[how], expected)
        assert_close(gradient[:5] * factor[how], expected_gradient)
        assert gradient[5].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
def test_the_mask_may_be_of_any_dtype(dtype):
    expected, expected_metrics = grpo_loss(**BATCH, kl_weight=0.3)
    batch = dict(BATCH, completion_mask=MASK.to(dtype))
    loss, metrics = grpo_loss(**batch, kl_weight=0.3)
    assert torch.equal(loss, expected)
    assert metrics == expected_metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_is_of_the_dtype_of_the_log_probs(dtype):
    """Advantages are computed in float64, and would otherwise turn everything into that."""
    batch = {name: x if name == "advantages" else x.to(dtype) for name, x in BATCH.items()}
    for surrogate in SURROGATES:
        assert grpo_loss(**batch, surrogate=surrogate, kl_weight=0.3)[0].dtype == dtype


# ---------------------------------------------------------------------------------------------
# grpo_loss: metrics

SHARES = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
RATIOS = ("ratio/min", "ratio/mean", "ratio/max")


@must_fail_on(
    (
        _ratio_metrics,
        'low = ((ratio < 1 - clip[0]) & (A < 0) & (surrogate == "clip")).double()',
        "low = (ratio < 1 - clip[0]).double()",
    ),
    "clipped_whatever_the_advantage",
    (
        _ratio_metrics,
        'low = ((ratio < 1 - clip[0]) & (A < 0) & (surrogate == "clip")).double()',
        "low = ((ratio < 1 - clip[0]) & (A < 0)).double()",
    ),
)
def test_the_metrics_by_hand():
    """Eight real tokens of these ratios; only those whose gradient the clip stops are counted."""
    ratios = [[0.5, 1.5, 1.1], [0.5, 0.6, 1.5], [1.5, 1.0, 9.9]]
    batch = {
        "log_probs": torch.zeros(3, 3, dtype=torch.float64),
        "old_log_probs": -float64(*ratios).log(),
        "advantages": float64(1, -1, 0),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]]),
        "ref_log_probs": float64([1, 1, 1], [1, 1, 1], [-1, -1, 50]),
        "entropy": float64([1, 1, 1], [2, 2, 2], [3, 4, 99]),
    }
    _, metrics = grpo_loss(**batch, estimator="k1")
    assert_close([metrics[name] for name in SHARES], [2 / 8, 1 / 8, 3 / 8])
    assert_close([metrics[name] for name in RATIOS], [0.5, 8.2 / 8, 1.5])
    assert_close(metrics["kl"], -4 / 8)
    assert_close(metrics["entropy"], 16 / 8)
    _, metrics = grpo_loss(**batch, estimator="k1", kl_correction=True)
    assert_close(metrics["kl"], (-5.7 + 2.5) / 8)
    _, metrics = grpo_loss(**batch, surrogate="cispo")
    assert_close([metrics[name] for name in SHARES], [0.0, 1 / 8, 1 / 8])


@pytest.mark.parametrize(("level", "power"), [("sequence", 1.0), ("geometric", 0.5)])
def test_metrics_of_one_ratio_per_row_by_hand(level, power):
    """Rows of one and of two tokens weigh the same: rows are counted, not tokens."""
    batch = {
        "log_probs": torch.zeros(3, 2, dtype=torch.float64),
        "old_log_probs": -float64([2.0, 9.9], [0.4, 0.4], [0.5, 0.5]).log(),
        "advantages": float64(1, -1, 1),
        "completion_mask": torch.tensor([[1, 0], [1, 1], [1, 1]]),
    }
    _, metrics = grpo_loss(**batch, level=level)
    assert_close([metrics[name] for name in SHARES], [1 / 3, 1 / 3, 2 / 3])
    low, middle, high = 0.16**power, 0.25**power, 2.0
    assert_close([metrics[name] for name in RATIOS], [low, (low + middle + high) / 3, high])


@given(masks(), SETTINGS, st.integers(0, 99))
def test_the_shares_and_the_ratios_equal_the_loops(mask, settings, seed):
    """Over real tokens, or over all rows: one without a token then has ratio 1."""
    batch = a_batch(mask, seed)
    rows = [batch[name].tolist() for name in ("log_probs", "old_log_probs")]
    level, clip = settings["level"], settings["clip"]
    seen = []  # (ratio, advantage) of every token, or of every row
    for A, row in zip(
        batch["advantages"].tolist(), terms_by_loops(*rows, mask.tolist(), rows[0], level)
    ):
        ratios = [ratio for _, ratio, _ in row]
        seen += [(ratio, A) for ratio in (ratios if level == "token" else ratios[:1] or [1.0])]
    high = [A > 0 and ratio > 1 + clip[1] for ratio, A in seen]
    low = [A < 0 and ratio < 1 - clip[0] for ratio, A in seen]
    if settings["surrogate"] == "cispo":
        low = [False] * len(seen)
    ratios = [ratio for ratio, _ in seen]
    _, metrics = grpo_loss(**batch, **settings)
    shares = [n / max(len(seen), 1) for n in (sum(low), sum(high), sum(low) + sum(high))]
    assert_close([metrics[name] for name in SHARES], shares)
    ratios = ratios or [1.0]
    expected = [min(ratios), statistics.fmean(ratios), max(ratios)]
    assert_close([metrics[name] for name in RATIOS], expected)


def test_metrics_are_plain_numbers_and_only_those_that_were_asked_for():
    always = {"policy_loss", *SHARES, *RATIOS}
    batch = dict(BATCH, log_probs=BATCH["log_probs"].clone().requires_grad_())
    _, metrics = grpo_loss(**batch)
    assert set(metrics) == always | {"kl", "entropy"}
    assert all(type(value) is float for value in metrics.values())
    del batch["ref_log_probs"], batch["entropy"]
    _, metrics = grpo_loss(**batch)
    assert set(metrics) == always
    assert all(type(value) is float for value in metrics.values())


def test_what_is_only_measured_does_not_change_the_loss():
    measured = loss_and_gradients(BATCH)
    unmeasured = loss_and_gradients(dict(BATCH, ref_log_probs=None, entropy=None))
    assert torch.equal(measured[0], unmeasured[0])
    assert torch.equal(measured[2], unmeasured[2])


# ---------------------------------------------------------------------------------------------
# grpo_loss: what must not matter


@given(st.data(), masks(min_rows=6, max_rows=6), SETTINGS)
def test_the_order_within_a_group_does_not_matter(data, mask, settings):
    """Rows of one group change places, with their rewards: so do their gradients."""
    order = data.draw(st.permutations([0, 1, 2])) + [3, 4, 5]
    rewards = float64(*data.draw(st.lists(st.integers(0, 3), min_size=6, max_size=6)))
    batch = dict(a_batch(mask), advantages=group_advantages(rewards, 3))
    moved = {name: values[order] for name, values in batch.items()}
    moved["advantages"] = group_advantages(rewards[order], 3)
    loss, metrics, gradient, _ = loss_and_gradients(batch, **settings)
    moved_loss, moved_metrics, moved_gradient, _ = loss_and_gradients(moved, **settings)
    assert_close(moved_loss, loss)
    assert_close(moved_gradient, gradient[order])
    assert_close(moved_metrics, metrics)


@given(masks(), SETTINGS, st.integers(1, 3), GARBAGE)
def test_more_padding_changes_nothing(mask, settings, columns, garbage):
    """Not even with how="constant": its constant is the budget, not the width."""
    batch = a_batch(mask)
    wide = dict(batch)
    for name, values in batch.items():
        if name != "advantages":
            padding = False if name == "completion_mask" else garbage
            wide[name] = torch.nn.functional.pad(values, (0, columns), value=padding)
    loss, metrics, gradient, _ = loss_and_gradients(batch, **settings)
    wide_loss, wide_metrics, wide_gradient, _ = loss_and_gradients(wide, **settings)
    assert_close(wide_loss, loss)
    assert_close(wide_gradient, torch.nn.functional.pad(gradient, (0, columns)))
    assert_close(wide_metrics, metrics)


def micro_batches(batch: dict[str, Tensor], rows: int) -> list[dict[str, Tensor]]:
    return [
        {name: values[i : i + rows] for name, values in batch.items()}
        for i in range(0, len(batch["advantages"]), rows)
    ]


@given(masks(min_rows=4, max_rows=4), SETTINGS)
def test_micro_batches_add_up_to_the_batch(mask, settings):
    """The mean of equal micro-batches, for token_mean weighted by their tokens."""
    settings["entropy_weight"] = 0.0  # the entropy bonus is a token mean whatever `how` says
    batch = a_batch(mask)
    expected, _, expected_gradient, _ = loss_and_gradients(batch, **settings)
    parts = micro_batches(batch, 2)
    weights = float64(1, 1)
    if settings["how"] == "token_mean":
        weights = float64(*[part["completion_mask"].sum().item() for part in parts])
    weights = weights / weights.sum().clamp(min=1)
    results = [loss_and_gradients(part, **settings) for part in parts]
    assert_close(sum(w * loss for w, (loss, *_) in zip(weights, results)), expected)
    gradient = torch.cat([w * gradient for w, (_, _, gradient, _) in zip(weights, results)])
    assert_close(gradient, expected_gradient)


def test_a_token_mean_depends_on_the_micro_batches():
    """One token against three: 3/4 of the weight becomes 1/2."""
    batch = {
        "log_probs": torch.zeros(2, 3, dtype=torch.float64),
        "old_log_probs": None,
        "advantages": float64(-4, -8),
        "completion_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
    }
    whole, _ = grpo_loss(**batch, how="token_mean")
    assert_close(whole.item(), (4 + 3 * 8) / 4)
    batch["old_log_probs"] = batch["log_probs"]
    parts = [grpo_loss(**part, how="token_mean")[0].item() for part in micro_batches(batch, 1)]
    assert_close(parts, [4.0, 8.0])
    assert_close((1 * parts[0] + 3 * parts[1]) / 4, whole.item())


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6), st.integers(-5, 5), st.integers(1, 9))
def test_the_loss_knows_neither_zero_nor_unit_of_the_rewards(rewards, shift, factor):
    mask = MASK.bool()
    batch = dict(a_batch(mask), advantages=group_advantages(float64(*rewards), 3, eps=0))
    moved = float64(*rewards) * factor + shift
    other = dict(batch, advantages=group_advantages(moved, 3, eps=0))
    assert_close(grpo_loss(**other)[0], grpo_loss(**batch)[0])


# ---------------------------------------------------------------------------------------------
# VARIANTS


def settings_of(variant: str) -> tuple[dict, dict]:
    """For group_advantages, for grpo_loss."""
    settings = VARIANTS[variant]
    first = {name: value for name, value in settings.items() if name in ADVANTAGE_SETTINGS}
    return first, {name: value for name, value in settings.items() if name not in first}


def test_the_variants_are_named_and_made_of_arguments():
    assert list(VARIANTS) == ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
    advantage_arguments = set(inspect.signature(group_advantages).parameters)
    loss_arguments = set(inspect.signature(grpo_loss).parameters)
    assert set(ADVANTAGE_SETTINGS) == advantage_arguments - {"rewards", "group_size", "eps"}
    assert not set(ADVANTAGE_SETTINGS) & loss_arguments
    for variant in VARIANTS:
        for_advantages, for_loss = settings_of(variant)
        assert set(for_advantages) <= advantage_arguments
        assert set(for_loss) <= loss_arguments - set(BATCH)


# Rewards 1 and 0, one token and three: what each variant pulls at, at its first update.
FIRST_GRADIENT = {
    "grpo": (-0.70700679 / 2, 0.70700679 / 6),  # 1 / (N * length)
    "dr_grpo": (-0.5 / 16, 0.5 / 16),  # no std; 1 / (N * max_length)
    "dapo": (-0.70700679 / 4, 0.70700679 / 4),  # 1 / tokens
    "gspo": (-0.70700679 / 2, 0.70700679 / 6),  # as grpo, until the policy moves
    "cispo": (-0.70700679 / 4, 0.70700679 / 4),
    "rloo": (-1 / 2, 1 / 2),  # no std; the whole sequence is the action
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_update_of_every_variant_by_hand(variant):
    for_advantages, for_loss = settings_of(variant)
    log_probs = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    advantages = group_advantages(float64(1, 0), 2, **for_advantages)
    loss, _ = grpo_loss(log_probs, None, advantages, mask, max_length=8, **for_loss)
    loss.backward()
    first, second = FIRST_GRADIENT[variant]
    expected = float64([first, 0, 0], [second, second, second])
    assert_close(log_probs.grad, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_later_update_of_every_variant_equals_the_loops(variant):
    for_advantages, for_loss = settings_of(variant)
    rewards = [1.0, 0.0, 0.5, 2.0, 0.0, 1.0]
    advantages = advantages_by_loops(rewards, 3, **for_advantages)
    batch = dict(BATCH, advantages=group_advantages(float64(*rewards), 3, **for_advantages))
    loss, _ = grpo_loss(**batch, max_length=9, **for_loss)
    (new, old, _, mask), rest = plain_numbers(batch)
    expected, _ = loss_by_loops(
        new, old, advantages.tolist(), mask, frozen=new, max_length=9, **rest, **for_loss
    )
    assert_close(loss.item(), expected)


# ---------------------------------------------------------------------------------------------
# bad input

TWO = torch.tensor([1.0, 0.0])
NUMBERS = torch.zeros(2, 3)
ONES = torch.ones(2, 3)
WITH_NAN = torch.tensor([[0.0, 0.0, 0.0], [0.0, NAN, 0.0]])


def loss_of(**changes) -> Callable[[], object]:
    arguments = dict(log_probs=NUMBERS, old_log_probs=None, advantages=TWO, completion_mask=ONES)
    return lambda: grpo_loss(**(arguments | changes))


REFUSED = {
    "group of one": (
        lambda: group_advantages(TWO, 1),
        r"group_size: expected a whole number of 2 or more, got 1$",
    ),
    "group of 2.0": (
        lambda: group_advantages(TWO, 2.0),
        r"group_size: expected a whole number of 2 or more, got 2\.0$",
    ),
    "groups that do not fill": (
        lambda: group_advantages(torch.zeros(5), 2),
        r"rewards: expected P \* 2 finite, got \[0\.0, 0\.0, 0\.0, 0\.0, 0\.0\]$",
    ),
    "rewards as a table": (
        lambda: equal_groups(torch.zeros(2, 2), 2),
        r"rewards: expected P \* 2 finite, got \[\[0\.0, 0\.0\], \[0\.0, 0\.0\]\]$",
    ),
    "a reward of nan": (
        lambda: group_advantages(torch.tensor([0.0, NAN]), 2),
        r"rewards: expected P \* 2 finite, got \[0\.0, nan\]$",
    ),
    "a reward of -inf": (
        lambda: equal_groups(torch.tensor([0.0, 0.0, -INF, 0.0]), 2),
        r"rewards: expected P \* 2 finite, got \[.*-inf",
    ),
    "scale": (
        lambda: group_advantages(TWO, 2, scale="std"),
        r"scale: expected one of group, batch, none, got 'std'$",
    ),
    "baseline": (
        lambda: group_advantages(TWO, 2, baseline="rloo"),
        r"baseline: expected one of mean, leave_one_out, none, got 'rloo'$",
    ),
    "an eps that turns the advantages around": (
        lambda: group_advantages(TWO, 2, eps=-1.0),
        r"eps: expected a finite number of 0 or more, got -1\.0$",
    ),
    "an eps that makes every advantage 0": (
        lambda: group_advantages(TWO, 2, eps=INF),
        r"eps: expected a finite number of 0 or more, got inf$",
    ),
    "estimator": (
        lambda: kl_estimate(NUMBERS, NUMBERS, estimator="k4"),
        r"estimator: expected one of k1, k2, k3, got 'k4'$",
    ),
    "reference of another shape": (
        lambda: kl_estimate(NUMBERS, NUMBERS[:1]),
        r"ref_log_probs: expected shape \(2, 3\), got \(1, 3\)$",
    ),
    "token ids as log-probs": (
        lambda: kl_estimate(NUMBERS.long(), NUMBERS),
        r"log_probs: expected floating point, got torch\.int64",
    ),
    "token ids as reference": (
        lambda: kl_estimate(NUMBERS, NUMBERS.long()),
        r"ref_log_probs: expected floating point, got torch\.int64",
    ),
    "how": (
        lambda: aggregate(NUMBERS, ONES, how="dapo"),
        r"how: expected one of sequence_mean, token_mean, constant, got 'dapo'$",
    ),
    "average with a mask of another shape": (
        lambda: aggregate(NUMBERS, ONES[:, :1]),
        r"mask: expected shape \(2, 3\), got \(2, 1\)$",
    ),
    "constant without max_length": (
        lambda: aggregate(NUMBERS, ONES, how="constant"),
        r"max_length: expected a whole number of 1 or more, got None$",
    ),
    "max_length 0": (
        lambda: aggregate(NUMBERS, ONES, how="constant", max_length=0),
        r"max_length: expected a whole number of 1 or more, got 0$",
    ),
    "max_length 2.5": (
        loss_of(how="constant", max_length=2.5),
        r"max_length: expected a whole number of 1 or more, got 2\.5$",
    ),
    "loss: level": (
        loss_of(level="gspo"),
        r"level: expected one of token, sequence, geometric, got 'gspo'$",
    ),
    "loss: surrogate": (
        loss_of(surrogate="ppo"),
        r"surrogate: expected one of clip, cispo, got 'ppo'$",
    ),
    "loss: how": (
        loss_of(how="bnpo"),
        r"how: expected one of sequence_mean, token_mean, constant, got 'bnpo'$",
    ),
    "loss: estimator": (
        loss_of(ref_log_probs=NUMBERS, estimator="kl"),
        r"estimator: expected one of k1, k2, k3, got 'kl'$",
    ),
    "loss: bounds as a clip": (
        loss_of(clip=(-0.2, 0.2)),
        r"clip: expected two numbers of 0 or more, got \(-0\.2, 0\.2\)$",
    ),
    "loss: clip of nan": (
        loss_of(clip=(0.2, NAN)),
        r"clip: expected two numbers of 0 or more, got \(0\.2, nan\)$",
    ),
    "loss: mask": (
        loss_of(completion_mask=ONES[:, :2]),
        r"completion_mask: expected shape \(2, 3\), got \(2, 2\)$",
    ),
    "loss: an advantage per token": (
        loss_of(advantages=ONES),
        r"advantages: expected shape \(2,\), got \(2, 3\)$",
    ),
    "loss: log-probs of nan": (
        loss_of(log_probs=WITH_NAN),
        r"log_probs: expected numbers, got nan at row, column \[1, 1\]$",
    ),
    "loss: old log-probs of nan": (
        loss_of(old_log_probs=WITH_NAN),
        r"old_log_probs: expected numbers, got nan at row, column \[1, 1\]$",
    ),
    "loss: a sampled token of probability 0": (
        loss_of(old_log_probs=torch.tensor([[0.0, 0.0, 0.0], [0.0, -INF, 0.0]])),
        r"old_log_probs: expected numbers, got -inf at row, column \[1, 1\]$",
    ),
    "loss: reference of nan": (
        loss_of(ref_log_probs=WITH_NAN),
        r"ref_log_probs: expected numbers, got nan at row, column \[1, 1\]$",
    ),
    "loss: token ids": (
        loss_of(log_probs=NUMBERS.long()),
        r"log_probs: expected floating point, got torch\.int64",
    ),
    "loss: old token ids": (
        loss_of(old_log_probs=NUMBERS.long()),
        r"old_log_probs: expected floating point, got torch\.int64",
    ),
    "loss: shape of the old log-probs": (
        loss_of(old_log_probs=NUMBERS[:1]),
        r"old_log_probs: expected shape \(2, 3\), got \(1, 3\)$",
    ),
    "loss: shape of the reference": (
        loss_of(ref_log_probs=NUMBERS.T),
        r"ref_log_probs: expected shape \(2, 3\), got \(3, 2\)$",
    ),
    "loss: shape of the entropy": (
        loss_of(entropy=NUMBERS[0]),
        r"entropy: expected shape \(2, 3\), got \(3,\)$",
    ),
    "loss: token ids as the entropy": (
        loss_of(entropy=NUMBERS.long()),
        r"entropy: expected floating point, got torch\.int64",
    ),
    "loss: entropy of nan": (
        loss_of(entropy=WITH_NAN),
        r"entropy: expected numbers, got nan at row, column \[1, 1\]$",
    ),
    "loss: no reference": (
        loss_of(kl_weight=0.04),
        r"ref_log_probs: expected a tensor, because kl_weight is 0\.04",
    ),
    "loss: no entropy": (
        loss_of(entropy_weight=0.01),
        r"entropy: expected a tensor, because entropy_weight is 0\.01",
    ),
    "loss: constant without max_length": (
        loss_of(how="constant"),
        r"max_length: expected a whole number of 1 or more, got None$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_argument_what_was_expected_and_what_came(name):
    call, message = REFUSED[name]
    kind = TypeError if "floating point" in message else ValueError
    with pytest.raises(kind, match="^" + message):
        call()
