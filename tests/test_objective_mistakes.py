"""The named mistakes, put one at a time into the real code, and a small case that shows each.

Most of them leave a loss that falls and a policy that learns something. Log-probs of 0 are no
accident: a ratio is then 1 / exp(old), and the numbers fit in one's head.
"""

from __future__ import annotations

import math
from math import log

import pytest
import torch
from support import float64
from torch import Tensor
from torch.testing import assert_close

from minigrpo.clinic.catalogue import MISTAKES, planted
from minigrpo.objective import (
    aggregate,
    clipped_surrogate,
    group_advantages,
    grpo_loss,
    kl_estimate,
    policy_ratio,
)


def slope(log_probs: list, old: list | None, advantages: list = (1.0,), **settings) -> Tensor:
    """d loss / d log_probs, all tokens real."""
    new = float64(*log_probs).requires_grad_()
    old = None if old is None else float64(*old)
    loss, _ = grpo_loss(new, old, float64(*advantages), torch.ones_like(new), **settings)
    return torch.autograd.grad(loss, new)[0]


def slope_at(*ratios: float, advantage: float = 1.0, **settings) -> Tensor:
    """The same of one row, by its ratios."""
    zeros, old = [0.0] * len(ratios), [-log(ratio) for ratio in ratios]
    return slope([zeros], [old], [advantage], **settings)[0]


def kl_slope(p: float, q: float, ratio: float = 1.0, **settings) -> Tensor:
    """What a KL term of weight 1 adds, at one token of probability p, q under the reference."""
    settings |= {"ref_log_probs": float64([log(q)]), "kl_weight": 1.0}
    return slope([[log(p)]], [[log(p) - log(ratio)]], [0.0], **settings)


def masked_slope(mask: list[int]) -> Tensor:
    """d loss / d log_probs of a row of which not all is real."""
    new = torch.zeros(1, len(mask)).double().requires_grad_()
    loss, _ = grpo_loss(new, None, float64(1), torch.tensor([mask]))
    return torch.autograd.grad(loss, new)[0]


def slope_of(name: str) -> Tensor:
    """d loss / d entropy, or old log-probs or advantages that arrive with a graph; None = none."""
    new, other = float64([-1.0]).requires_grad_(), float64([1.0]).requires_grad_()
    old = other - 2.1 if name == "old" else None
    advantages = other[0] if name == "advantages" else float64(1)
    bonus = {"entropy": other, "entropy_weight": 0.5} if name == "entropy" else {}
    loss, _ = grpo_loss(new, old, advantages.reshape(1), torch.ones(1, 1), **bonus)
    (gradient,) = torch.autograd.grad(loss, other, allow_unused=True)
    return 0.0 if gradient is None else gradient


def refused() -> bool:
    try:
        group_advantages(float64(1, 0), 1, scale="none")
    except ValueError:
        return True
    return False


# One token of 10, and four of mean 2.5; a row of two and one without any.
TOKENS, RAGGED = float64([10, 0, 0, 0], [1, 2, 3, 4]), torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
HALF = float64([3, 3], [3, 3]), torch.tensor([[1, 1], [0, 0]])


def wide(columns: int) -> float:
    """Dr. GRPO's average of the same tokens and the same budget with more padding."""
    padded = [torch.nn.functional.pad(x, (0, columns)) for x in (TOKENS, RAGGED)]
    return aggregate(*padded, how="constant", max_length=5)


def geometric() -> Tensor:
    """Two real tokens of ratio 4 and two of padding: the geometric mean is 4, not 2."""
    old = -float64([4, 4, 4, 4]).log()
    return policy_ratio(0 * old, old, torch.tensor([[1, 1, 0, 0]]), level="geometric")


CHECKS = {  # the case, and what it is without the mistake
    "old_over_new": (
        lambda: policy_ratio(float64([0.6]).log(), float64([0.2]).log(), torch.ones(1, 1)),
        [[3.0]]),
    "geometric_ratio_divides_by_the_width": (geometric, [[4.0]]),
    "ratio_against_itself_though_there_are_old_log_probs": (lambda: slope_at(1.1), [-1.1]),
    "old_log_probs_not_detached": (lambda: slope_of("old"), 0.0),
    # new - new is 0 with slope 0; new - new.detach() is 0 with slope 1.
    "first_update_without_a_gradient": (lambda: slope([[-1.0]], None), [[-1.0]]),
    "max_for_min": (lambda: clipped_surrogate(float64(1.5), float64(1), (0.2, 0.2)), [1.2]),
    # A token that became unlikelier though it was good has to keep its gradient.
    "clamp_without_min": (lambda: slope_at(0.5), [-0.5]),
    "negative_advantages_clipped_on_the_wrong_side": (lambda: slope_at(0.5, 1.5, advantage=-1.0),
        [0.0, 0.75]),
    "clip_low_and_high_swapped": (
        lambda: clipped_surrogate(float64(2, 0.1), float64(1, -1), (0.2, 0.28)), [1.28, -0.8]),
    # Below the cap the gradient of ratio * log-prob would be ratio * (1 + log-prob).
    "cispo_weight_not_detached": (lambda: slope([[-3.0]], None, surrogate="cispo"), [[-1.0]]),
    "cispo_caps_at_the_clip_instead_of_one_plus_the_clip": (
        lambda: slope_at(1.0, surrogate="cispo"), [-1.0]),
    # On-policy that is 0, however far the policy is from its reference.
    "kl_against_the_old_policy": (lambda: kl_slope(0.5, 0.25), [[0.5]]),
    # Also 0 at 0 and never negative, but its mean is no KL.
    "k3_with_the_opposite_sign": (lambda: kl_estimate(float64(0.5).log(), float64(0.25).log()),
        [0.5 - 1 + log(2)]),
    "kl_div_of_sampled_tokens": (lambda: kl_estimate(float64(0.5).log(), float64(0.25).log()),
        [0.5 - 1 + log(2)]),
    "kl_div_without_log_target": (lambda: kl_estimate(float64(0.5).log(), float64(0.25).log()),
        [0.5 - 1 + log(2)]),
    "kl_without_a_gradient": (lambda: kl_slope(0.5, 0.25), [[0.5]]),
    "k1_with_the_opposite_sign": (lambda: kl_slope(0.25, 0.25), [[0.0]]),
    # It pushes every token down alike, even where policy and reference agree.
    "k1_as_the_loss": (lambda: kl_slope(0.25, 0.25), [[0.0]]),
    "kl_subtracted_from_the_loss": (lambda: kl_slope(0.5, 0.25) > 0, [[True]]),
    # k1 * ratio has slope ratio * (1 + log p/q).
    "kl_correction_without_the_gradient_of_the_ratio": (
        lambda: kl_slope(0.5, 0.25, ratio=3.0, estimator="k1", kl_correction=True),
        [[3 * (1 + log(2))]]),
    "entropy_penalty_instead_of_a_bonus": (lambda: slope_of("entropy"), [[-0.5]]),
    "entropy_detached": (lambda: slope_of("entropy"), [[-0.5]]),
    "mask_by_multiplication": (lambda: aggregate(float64([2, math.nan]), torch.tensor([[1, 0]])),
        2.0),
    "mask_in_the_denominator_only": (lambda: aggregate(float64([2, 100]), torch.tensor([[1, 0]])),
        2.0),
    "mask_off_by_one": (lambda: masked_slope([0, 1, 0]), [[0.0, -1.0, 0.0]]),
    "mean_over_the_padding": (lambda: aggregate(TOKENS, RAGGED), 6.25),
    "row_mean_for_token_mean": (lambda: aggregate(TOKENS, RAGGED, how="token_mean"), 4.0),
    "token_mean_for_row_mean": (lambda: aggregate(TOKENS, RAGGED), 6.25),
    "sum_over_the_rows": (lambda: aggregate(torch.cat([TOKENS] * 3), torch.cat([RAGGED] * 3)),
        6.25),
    "dr_grpo_divides_by_the_width": (lambda: [wide(0), wide(4)], [2.0, 2.0]),
    "dr_grpo_divides_by_the_lengths": (lambda: wide(0), 2.0),
    "masked_rows_leave_the_denominator": (lambda: aggregate(*HALF), 1.5),
    "masked_row_divides_by_zero": (lambda: aggregate(*HALF), 1.5),
    # G - 1 in the denominator: the std of (1, 0) is 0.707, not 0.5.
    "population_std": (lambda: group_advantages(float64(1, 0), 2), [0.70700679, -0.70700679]),
    # Seen where eps is not small.
    "std_clamped_instead_of_plus_eps": (lambda: group_advantages(float64(1, 0), 2, eps=0.5)[0],
        0.5 / (math.sqrt(0.5) + 0.5)),
    # A unit ten times smaller changes nothing.
    "variance_for_std": (lambda: group_advantages(float64(10, 0), 2, eps=0.0),
        [math.sqrt(0.5), -math.sqrt(0.5)]),
    # An easy and a hard prompt: without a group of its own the hard one is only punished.
    "mean_over_the_batch": (lambda: group_advantages(float64(10, 8, 1, 0), 2) > 0,
        [True, False, True, False]),
    "std_over_the_batch": (lambda: group_advantages(float64(100, 0, 1, 0), 2, eps=0.0)[::2],
        [math.sqrt(0.5), math.sqrt(0.5)]),
    "groups_mix_prompts": (lambda: group_advantages(float64(2, 0, 1, 1), 2, scale="none"),
        [1.0, -1.0, 0.0, 0.0]),
    # The mean of three times 0.1 is not 0.1, and eps magnifies the difference.
    "equal_rewards_not_exactly_zero": (lambda: group_advantages(float64(0.1, 0.1, 0.1), 3) == 0,
        [True, True, True]),
    "group_of_one_accepted": (refused, True),
    # Silent wherever there are as many rows as columns.
    "advantages_along_the_tokens": (lambda: slope([[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2, [1.0, -1.0]),
        [[-0.25, -0.25], [0.25, 0.25]]),
    # Only visible where the reward is a differentiable function, such as a KL penalty.
    "advantages_not_detached": (lambda: slope_of("advantages"), 0.0),
    "loss_minimises_the_objective": (lambda: slope_at(1.0) < 0, [True]),
    "the_whole_loss_negated": (lambda: kl_slope(0.5, 0.25) > 0, [[True]]),
    "one_ratio_for_the_batch": (
        lambda: policy_ratio(float64([2], [3]).log(), float64([0], [0]), torch.ones(2, 1)),
        [[2.0], [3.0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", [mistake.name for mistake in MISTAKES])
def test_the_case_is_right_without_the_mistake_and_shows_it(name):
    case, right = CHECKS[name]
    right = torch.as_tensor(right, dtype=torch.float64)

    def check() -> None:
        assert_close(torch.as_tensor(case(), dtype=torch.float64), right)

    check()
    with planted(name), pytest.raises(AssertionError):
        check()
    check()
