"""The objective, from rewards to the loss: value and gradient against hand numbers and loops.

The references here are plain Python on floats; the gradients are their central differences.
"""

import itertools
import math
import re
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support import GARBAGE, float64, masks, uniform
from torch import Tensor
from torch.testing import assert_close

from minigrpo.objective import (
    aggregate,
    equal_groups,
    group_advantages,
    grpo_loss,
    kl_estimate,
    policy_ratio,
)

Rows = list[list[float]]

NAN, INF = math.nan, math.inf
SCALES, BASELINES = ("group", "batch", "none"), ("mean", "leave_one_out")
LEVELS, SURROGATES = ("token", "sequence", "geometric"), ("clip", "cispo")
ESTIMATORS, AVERAGES = ("k1", "k2", "k3"), ("sequence_mean", "token_mean", "constant")


def ratios_of_a_row(log_ratios: list[float], level: str) -> list[float]:
    """One per token, also where the tokens share it."""
    product = math.prod(math.exp(x) for x in log_ratios)
    if level == "token":
        return [math.exp(x) for x in log_ratios]
    if level == "sequence":
        return [product] * len(log_ratios)
    return [product ** (1 / len(log_ratios))] * len(log_ratios)


@given(masks(empty=False), GARBAGE, GARBAGE)
def test_no_ratio_reads_what_is_masked_and_its_gradient_is_0_there(mask, junk, old_junk):
    """Their values are those of the loss, below."""
    clean = [uniform(*mask.shape, seed=seed) for seed in (1, 2)]
    garbled = [x.masked_fill(~mask, number) for x, number in zip(clean, (junk, old_junk))]
    garbled[0].requires_grad_()
    for level in LEVELS:
        ratio = policy_ratio(*garbled, mask, level=level)
        assert torch.equal(ratio, policy_ratio(*clean, mask, level=level))
        gradient = torch.autograd.grad(ratio.sum(), garbled[0])[0]
        assert gradient[mask].gt(0).all() and gradient[~mask].eq(0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_without_a_token_has_ratio_one(level):
    assert policy_ratio(torch.ones(1, 2), *torch.zeros(2, 1, 2), level=level).eq(1).all()


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


@given(reward_groups())
def test_advantages_equal_their_definition(rewards_and_size):
    rewards, size = rewards_and_size
    assume(len(set(rewards)) > 1)
    for scale, baseline, eps in itertools.product(SCALES, BASELINES, (1e-4, 0.5)):
        advantages = group_advantages(
            float64(*rewards), size, scale=scale, baseline=baseline, eps=eps
        )
        assert_close(advantages, advantages_by_loops(rewards, size, scale, baseline, eps))


DTYPES = (torch.float64, torch.float32, torch.float16, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rewards_of_any_dtype_by_hand(dtype):
    """One hit in 64: the mean is 1/64, the sample std exactly 1/8."""
    for rewards, std in (([1, 0, 1, 1], 0.5), ([0] * 63 + [1], 1 / 8), ([0] * 4, 1.0)):
        advantages = group_advantages(torch.tensor(rewards, dtype=dtype), len(rewards))
        assert advantages.dtype == (dtype if dtype.is_floating_point else torch.float32)
        mean = statistics.fmean(rewards)
        expected = float64(*[(reward - mean) / (std + 1e-4) for reward in rewards])
        tolerance = {torch.float64: 1e-12, torch.float16: 2e-3}.get(dtype, 1e-6)
        assert_close(advantages.double(), expected, rtol=tolerance, atol=0)


def test_equal_rewards_have_advantages_of_exactly_zero():
    for rewards in (torch.full((16,), 5.7), float64(0.1, 0.1, 0.1), float64(*[1 / 3] * 7)):
        for scale, baseline, eps in itertools.product(SCALES, BASELINES, (1e-4, 0.0)):
            advantages = group_advantages(
                rewards, len(rewards), scale=scale, baseline=baseline, eps=eps
            )
            assert torch.equal(advantages, torch.zeros_like(rewards))


def test_without_a_baseline_the_advantage_is_the_reward():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.1, 0.1])
    advantages = group_advantages(rewards, 2, scale="none", baseline="none")
    assert torch.equal(advantages, rewards)
    whole = group_advantages(torch.tensor([1, 0]), 2, scale="none", baseline="none")
    assert whole.tolist() == [1.0, 0.0] and whole.dtype == torch.get_default_dtype()
    for scale in ("group", "batch"):
        with pytest.raises(ValueError, match=f"^scale: expected 'none' .*, got '{scale}'$"):
            group_advantages(rewards, 2, scale=scale, baseline="none")


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


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    near = kl_estimate(torch.tensor([1e-4, -1e-4]), torch.zeros(2))
    assert_close(near, torch.full((2,), 5e-9), rtol=0.01, atol=0)


def average_by_loops(rows: Rows, how: str, max_length: int | None = None) -> float:
    """rows holds the real tokens only."""
    tokens = [token for row in rows for token in row]
    if how == "sequence_mean":
        return statistics.fmean(statistics.fmean(row) if row else 0.0 for row in rows)
    if how == "token_mean":
        return statistics.fmean(tokens) if tokens else 0.0
    return math.fsum(tokens) / (len(rows) * max_length)


@given(masks(), GARBAGE, st.sampled_from([torch.bool, torch.int64, torch.float32]))
def test_every_average_equals_its_definition_in_value_and_gradient(mask, garbage, dtype):
    per_token = uniform(*mask.shape)
    rows = [[x.item() for x, real in zip(*row) if real] for row in zip(per_token, mask)]
    lengths = mask.sum(dim=1, keepdim=True)
    weights = {
        "sequence_mean": 1 / (len(mask) * lengths.clamp(min=1)),
        "token_mean": 1 / lengths.sum().clamp(min=1),
        "constant": torch.tensor(1 / (len(mask) * 7)),
    }
    for how, weight in weights.items():
        garbled = per_token.masked_fill(~mask, garbage).requires_grad_()
        average = aggregate(garbled, mask.to(dtype), how=how, max_length=7)
        assert_close(average.item(), average_by_loops(rows, how, 7))
        (gradient,) = torch.autograd.grad(average, garbled)
        assert_close(gradient, (weight * mask).double(), rtol=1e-6, atol=0)


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
# Rows far above and far below the clip, of both signs, one in between, and one without a token.
# Row by row, so that the three levels meet both sides too; holes, so that order cannot matter.
MASK = torch.tensor(
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
)
LOG_RATIO = float64([0.5], [-0.5], [0.6], [-0.6], [0.04], [0.0]) + 0.2 * uniform(6, 4, seed=8)
BATCH = {**a_batch(MASK, seed=3), "advantages": float64(1.2, 0.7, -0.9, -1.1, 0.4, 2.0)}
BATCH["old_log_probs"] = BATCH["log_probs"] - LOG_RATIO
CLIP = (0.2, 0.28)


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

    loss, metrics, gradient, entropy_gradient = loss_and_gradients(batch, **settings)
    expected, measured = loss_by_loops(new, old, A, mask, frozen=new, **rest)
    assert_close(loss.item(), expected, rtol=1e-12, atol=1e-12)
    assert_close({name: metrics[name] for name in measured}, measured)
    assert_close(gradient, central_differences(by_policy, new), rtol=1e-7, atol=1e-8)
    if settings["entropy_weight"]:
        expected = central_differences(by_entropy, rest["entropy"])
        assert_close(entropy_gradient, expected, rtol=1e-7, atol=1e-8)
    else:
        assert entropy_gradient is None


def test_a_token_that_has_become_impossible_has_ratio_zero():
    """Only a sampled token of probability 0 is an error (`REFUSED`)."""
    log_probs, old = float64([-1.0, -INF]), float64([-1.0, -1.0])
    loss, metrics = grpo_loss(log_probs, old, float64(1), torch.ones(1, 2))
    assert_close(loss.item(), -0.5)
    assert metrics["ratio/min"] == 0


def test_only_the_policy_and_its_entropy_receive_a_gradient():
    for surrogate in SURROGATES:
        batch = {n: x.clone().requires_grad_(n != "completion_mask") for n, x in BATCH.items()}
        weights = {"kl_weight": 0.3, "kl_correction": True, "entropy_weight": 0.7}
        grpo_loss(**batch, surrogate=surrogate, **weights)[0].backward()
        reached = {name for name, x in batch.items() if x.grad is not None}
        assert reached == {"log_probs", "entropy"}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_is_of_the_dtype_of_the_log_probs(dtype):
    """Advantages are computed in float64, and would otherwise turn everything into that."""
    batch = {name: x if name == "advantages" else x.to(dtype) for name, x in BATCH.items()}
    for surrogate in SURROGATES:
        assert grpo_loss(**batch, surrogate=surrogate, kl_weight=0.3)[0].dtype == dtype


SHARES = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
RATIOS = ("ratio/min", "ratio/mean", "ratio/max")


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
    batch = dict(BATCH, log_probs=BATCH["log_probs"].clone().requires_grad_())
    for asked in ({"kl", "entropy"}, set()):
        _, metrics = grpo_loss(**batch)
        assert set(metrics) == {"policy_loss", *SHARES, *RATIOS} | asked
        assert all(type(value) is float for value in metrics.values())
        batch |= {"ref_log_probs": None, "entropy": None}


TWO = torch.tensor([1.0, 0.0])
NUMBERS = torch.zeros(2, 3)
ONES = torch.ones(2, 3)
WITH_NAN = torch.tensor([[0.0, 0.0, 0.0], [0.0, NAN, 0.0]])


def loss_of(**changes) -> Callable[[], object]:
    arguments = dict(log_probs=NUMBERS, old_log_probs=None, advantages=TWO, completion_mask=ONES)
    return lambda: grpo_loss(**(arguments | changes))


LEVEL = "level: expected one of token, sequence, geometric, got 'gspo'"
ESTIMATOR = "estimator: expected one of k1, k2, k3, got 'k4'"
HOW = "how: expected one of sequence_mean, token_mean, constant, got 'dapo'"
EPS = "eps: expected a finite number of 0 or more, got"
WHOLE = "a whole number of"
FLOATS = "expected floating point, got torch.int64"
INTS, OTHER = NUMBERS.long(), NUMBERS.T
IMPOSSIBLE = torch.tensor([[0.0, 0.0, 0.0], [0.0, -INF, 0.0]])
AT = "at row, column [1, 1]"
SHAPE = "expected shape (2, 3), got"
REFUSED = {
    f"group_size: expected {WHOLE} 2 or more, got 1": lambda: group_advantages(TWO, 1),
    "rewards: expected P * 2 finite, got [0.0, 0.0, 0.0]": lambda: equal_groups(ONES[0] * 0, 2),
    "rewards: expected P * 2 finite, got [[1.0, 1.0": lambda: equal_groups(ONES, 2),
    "rewards: expected P * 2 finite, got [0.0, nan]": lambda: group_advantages(float64(0, NAN), 2),
    "rewards: expected P * 2 finite, got [inf, nan]": lambda: equal_groups(TWO * INF, 2),
    "scale: expected one of group, batch, none": lambda: group_advantages(TWO, 2, scale="std"),
    "baseline: expected one of mean, leave": lambda: group_advantages(TWO, 2, baseline="rloo"),
    f"{EPS} -1": lambda: group_advantages(TWO, 2, eps=-1),
    f"{EPS} inf": lambda: group_advantages(TWO, 2, eps=INF),
    LEVEL: lambda: policy_ratio(NUMBERS, NUMBERS, ONES, level="gspo"),
    f"mask: {SHAPE} (1, 3)": lambda: policy_ratio(NUMBERS, NUMBERS, ONES[:1]),
    f"log_probs: {FLOATS}": lambda: policy_ratio(INTS, NUMBERS, ONES),
    f"old_log_probs: {FLOATS}": lambda: policy_ratio(NUMBERS, INTS, ONES),
    f"old_log_probs: {SHAPE} (2, 1)": lambda: policy_ratio(NUMBERS, NUMBERS[:, :1], ONES),
    ESTIMATOR: lambda: kl_estimate(NUMBERS, NUMBERS, estimator="k4"),
    f"ref_log_probs: {SHAPE} (1, 3)": lambda: kl_estimate(NUMBERS, NUMBERS[:1]),
    f"log_probs: {FLOATS} (token ids?)": lambda: kl_estimate(INTS, NUMBERS),
    f"ref_log_probs: {FLOATS}": lambda: kl_estimate(NUMBERS, INTS),
    HOW: lambda: aggregate(NUMBERS, ONES, how="dapo"),
    f"mask: {SHAPE} (2, 1)": lambda: aggregate(NUMBERS, ONES[:, :1]),
    f"max_length: expected {WHOLE} 1 or more, got None": loss_of(how="constant"),
    f"max_length: expected {WHOLE} 1 or more, got 2.5": loss_of(how="constant", max_length=2.5),
    f"rows: expected {WHOLE} 2 or more, got 1": loss_of(whole=(1, 6)),
    f"tokens: expected {WHOLE} 6 or more, got 5": loss_of(whole=(2, 5)),
    "surrogate: expected one of clip, cispo, got 'ppo'": loss_of(surrogate="ppo"),
    "clip: expected two numbers of 0 or more, got (-0.2, 0.2)": loss_of(clip=(-0.2, 0.2)),
    "clip: expected two numbers of 0 or more, got (0.2, nan)": loss_of(clip=(0.2, NAN)),
    f"completion_mask: {SHAPE} (2, 2)": loss_of(completion_mask=ONES[:, :2]),
    "advantages: expected shape (2,), got (2, 3)": loss_of(advantages=ONES),
    f"log_probs: expected numbers, got nan {AT}": loss_of(log_probs=WITH_NAN),
    f"old_log_probs: expected numbers, got nan {AT}": loss_of(old_log_probs=WITH_NAN),
    f"old_log_probs: expected numbers, got -inf {AT}": loss_of(old_log_probs=IMPOSSIBLE),
    f"ref_log_probs: expected numbers, got nan {AT}": loss_of(ref_log_probs=WITH_NAN),
    f"entropy: expected numbers, got nan {AT}": loss_of(entropy=WITH_NAN),
    f"log_probs: {FLOATS} ": loss_of(log_probs=INTS),
    f"old_log_probs: {FLOATS} ": loss_of(old_log_probs=INTS),
    f"entropy: {FLOATS}": loss_of(entropy=INTS),
    f"old_log_probs: {SHAPE} (3, 2)": loss_of(old_log_probs=OTHER),
    f"ref_log_probs: {SHAPE} (3, 2)": loss_of(ref_log_probs=OTHER),
    f"entropy: {SHAPE} (3, 2)": loss_of(entropy=OTHER),
    "ref_log_probs: expected a tensor, because kl_weight is 0.04": loss_of(kl_weight=0.04),
    "entropy: expected a tensor, because entropy_weight is 0.01": loss_of(entropy_weight=0.01),
}


@pytest.mark.parametrize("message", REFUSED)
def test_errors_name_the_argument_what_was_expected_and_what_came(message):
    """A key that ends with a space is the same message, of `grpo_loss`."""
    kind = TypeError if "floating point" in message else ValueError
    with pytest.raises(kind, match="^" + re.escape(message.strip())):
        REFUSED[message]()
