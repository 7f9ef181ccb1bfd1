"""Classic mistakes, put one at a time into the real code, and the small check that finds each.

Most of them leave a loss that falls and a policy that learns something. The name of a check is
the name of the mistake. Log-probs of 0 are no accident: a ratio is then 1 / exp(old), and the
numbers fit in one's head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support import float64, mutated
from torch import Tensor
from torch.testing import assert_close

from minigrpo import objective
from minigrpo.clinic.planted import MISTAKES
from minigrpo.objective import (
    aggregate,
    clipped_surrogate,
    group_advantages,
    grpo_loss,
    kl_estimate,
    policy_ratio,
)

CHECKS: dict[str, Callable[[], None]] = {}


def found(check: Callable[[], None]) -> Callable[[], None]:
    """Enter a check, under the name of its mistake."""
    CHECKS[check.__name__] = check
    return check


def loss_at(ratios, advantages=(1.0,), mask=None, **settings) -> tuple[float, Tensor]:
    """The loss, and its gradient in log_probs, where the new policy has log-probs of 0."""
    log_probs = torch.zeros_like(float64(*ratios)).requires_grad_()
    old_log_probs = -float64(*ratios).log()
    mask = torch.ones_like(log_probs) if mask is None else torch.tensor(mask)
    loss, _ = grpo_loss(log_probs, old_log_probs, float64(*advantages), mask, **settings)
    loss.backward()
    return loss.item(), log_probs.grad


# ---------------------------------------------------------------------------------------------
# the ratio


@found
def old_over_new():
    ratio = policy_ratio(float64([0.6]).log(), float64([0.2]).log(), torch.ones(1, 1))
    assert_close(ratio, float64([3.0]))


@found
def geometric_ratio_divides_by_the_width():
    """Two real tokens of ratio 4 and two of padding: the geometric mean is 4, not 2."""
    mask = torch.tensor([[1, 1, 0, 0]])
    old = -float64([4, 4, 4, 4]).log()
    ratio = policy_ratio(torch.zeros_like(old), old, mask, level="geometric")
    assert_close(ratio, float64([4.0]))


@found
def ratio_against_itself_though_there_are_old_log_probs():
    """The ratio is then 1 in every update, and the clip never acts."""
    loss, _ = loss_at([[1.1]])
    assert_close(loss, -1.1)


@found
def old_log_probs_not_detached():
    """Stored with their graph, they pull the other way with the same force."""
    log_probs = float64([0.0]).requires_grad_()
    loss, _ = grpo_loss(log_probs, log_probs - 0.1, float64(1), torch.ones(1, 1))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert_close(gradient.item(), -math.exp(0.1))


@found
def first_update_without_a_gradient():
    """new - new is 0 with slope 0; new - new.detach() is 0 with slope 1."""
    log_probs = float64([-1.0]).requires_grad_()
    loss, _ = grpo_loss(log_probs, None, float64(1), torch.ones(1, 1))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert_close(gradient.item(), -1.0)


# ---------------------------------------------------------------------------------------------
# the clip


@found
def max_for_min():
    surrogate = clipped_surrogate(float64(1.5), float64(1), (0.2, 0.2))
    assert_close(surrogate, float64(1.2))


@found
def clamp_without_min():
    """A token that became unlikelier though it was good has to keep its gradient."""
    _, gradient = loss_at([[0.5]])
    assert_close(gradient.item(), -0.5)


@found
def negative_advantages_clipped_on_the_wrong_side():
    """At A < 0 the lower bound stops the gradient, and the upper one does not."""
    _, gradient = loss_at([[0.5, 1.5]], advantages=[-1])
    assert_close(gradient, float64([0.0, 0.75]))


@found
def clip_low_and_high_swapped():
    surrogate = clipped_surrogate(float64(2, 0.1), float64(1, -1), (0.2, 0.28))
    assert_close(surrogate, float64(1.28, -0.8))


@found
def cispo_weight_not_detached():
    """Below the cap the gradient of ratio * log-prob would be ratio * (1 + log-prob)."""
    log_probs = float64([-3.0]).requires_grad_()
    loss, _ = grpo_loss(log_probs, None, float64(1), torch.ones(1, 1), surrogate="cispo")
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert_close(gradient.item(), -1.0)


@found
def cispo_caps_at_the_clip_instead_of_one_plus_the_clip():
    """With 0.2 every gradient of the first update is a fifth of what it should be."""
    _, gradient = loss_at([[1.0]], surrogate="cispo", clip=(0.2, 0.2))
    assert_close(gradient.item(), -1.0)


# ---------------------------------------------------------------------------------------------
# KL and entropy


def kl_gradient(probability: float, reference: float, ratio: float = 1.0, **settings) -> float:
    """What kl_weight=1 adds to the gradient at a single token, without an advantage."""
    log_probs = float64([math.log(probability)]).requires_grad_()
    old, ref = log_probs.detach() - math.log(ratio), float64([math.log(reference)])
    arguments = (log_probs, old, float64(0), torch.ones(1, 1))
    loss, _ = grpo_loss(*arguments, ref_log_probs=ref, kl_weight=1.0, **settings)
    return torch.autograd.grad(loss, log_probs)[0].item()


@found
def kl_against_the_old_policy():
    """On-policy that is 0, however far the policy is from its reference."""
    assert_close(kl_gradient(0.5, 0.25), 0.5)


@found
def k3_with_the_opposite_sign():
    """Also 0 at 0 and never negative, but its mean is no KL: p = 1/2, q = 1/4."""
    k3 = kl_estimate(float64(0.5).log(), float64(0.25).log())
    assert_close(k3, float64(0.5 - 1 + math.log(2)))


@found
def k1_as_the_loss():
    """It pushes every token down alike, even where policy and reference agree."""
    assert_close(kl_gradient(0.25, 0.25), 0.0)


@found
def kl_subtracted_from_the_loss():
    """A token likelier than under the reference has to be pushed down: a positive slope."""
    assert kl_gradient(0.5, 0.25) > 0


@found
def kl_correction_without_the_gradient_of_the_ratio():
    """k1 * ratio has slope ratio * (1 + log p/q)."""
    gradient = kl_gradient(0.5, 0.25, ratio=3.0, estimator="k1", kl_correction=True)
    assert_close(gradient, 3 * (1 + math.log(2)))


def entropy_gradient() -> Tensor | None:
    entropy = float64([1.0]).requires_grad_()
    arguments = (float64([-1.0]), None, float64(1), torch.ones(1, 1))
    loss, _ = grpo_loss(*arguments, entropy=entropy, entropy_weight=0.5)
    return torch.autograd.grad(loss, entropy, allow_unused=True)[0] if loss.requires_grad else None


@found
def entropy_penalty_instead_of_a_bonus():
    assert entropy_gradient().item() == -0.5


@found
def entropy_detached():
    """The loss shows it, and nothing follows from it."""
    assert entropy_gradient() is not None


# ---------------------------------------------------------------------------------------------
# masks and means

# One token of 10, and four of mean 2.5.
TOKENS = float64([10, 0, 0, 0], [1, 2, 3, 4])
RAGGED = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])


@found
def mask_by_multiplication():
    """0 * NaN is NaN."""
    average = aggregate(float64([2, math.nan]), torch.tensor([[1, 0]]))
    assert_close(average.item(), 2.0)


@found
def mask_in_the_denominator_only():
    average = aggregate(float64([2, 100]), torch.tensor([[1, 0]]))
    assert_close(average.item(), 2.0)


@found
def mean_over_the_padding():
    assert_close(aggregate(TOKENS, RAGGED).item(), 6.25)


@found
def row_mean_for_token_mean():
    assert_close(aggregate(TOKENS, RAGGED, how="token_mean").item(), 4.0)


@found
def sum_over_the_rows():
    """The step then grows with the batch."""
    assert_close(aggregate(torch.cat([TOKENS] * 3), torch.cat([RAGGED] * 3)).item(), 6.25)


@found
def dr_grpo_divides_by_the_width():
    """The same tokens with more padding, and the same budget."""
    for columns in (0, 4):
        wide = [torch.nn.functional.pad(x, (0, columns)) for x in (TOKENS, RAGGED)]
        assert_close(aggregate(*wide, how="constant", max_length=5).item(), 2.0)


@found
def dr_grpo_divides_by_the_lengths():
    """Every token has to weigh the same, whatever the length of its row."""
    tokens = TOKENS.clone().requires_grad_()
    average = aggregate(tokens, RAGGED, how="constant", max_length=5)
    (gradient,) = torch.autograd.grad(average, tokens)
    assert gradient[0, 0] == gradient[1, 0]


@found
def masked_rows_leave_the_denominator():
    average = aggregate(float64([3, 3], [3, 3]), torch.tensor([[1, 1], [0, 0]]))
    assert_close(average.item(), 1.5)


@found
def masked_row_divides_by_zero():
    average = aggregate(float64([3, 3], [3, 3]), torch.tensor([[1, 1], [0, 0]]))
    assert average.isfinite()


# ---------------------------------------------------------------------------------------------
# advantages


@found
def population_std():
    """G - 1 in the denominator: the std of (1, 0) is 0.707, not 0.5."""
    assert_close(group_advantages(float64(1, 0), 2), float64(0.70700679, -0.70700679))


@found
def std_clamped_instead_of_plus_eps():
    """Seen where eps is not small: 0.5 / (0.7071 + 0.5)."""
    advantages = group_advantages(float64(1, 0), 2, eps=0.5)
    assert_close(advantages[0].item(), 0.5 / (math.sqrt(0.5) + 0.5))


@found
def variance_for_std():
    """A unit ten times smaller changes nothing."""
    advantages = group_advantages(float64(10, 0), 2, eps=0.0)
    assert_close(advantages, group_advantages(float64(1, 0), 2, eps=0.0))


@found
def mean_over_the_batch():
    """An easy and a hard prompt: without a group of its own the hard one is only punished."""
    advantages = group_advantages(float64(10, 8, 1, 0), 2)
    assert (advantages > 0).tolist() == [True, False, True, False]


@found
def std_over_the_batch():
    advantages = group_advantages(float64(100, 0, 1, 0), 2, eps=0.0)
    assert_close(advantages[0], advantages[2])


@found
def groups_mix_prompts():
    """Rows 0 and 1 answer one prompt, rows 2 and 3 another."""
    advantages = group_advantages(float64(2, 0, 1, 1), 2, scale="none")
    assert advantages.tolist() == [1, -1, 0, 0]


@found
def equal_rewards_not_exactly_zero():
    """The mean of three times 0.1 is not 0.1, and eps magnifies the difference."""
    assert group_advantages(float64(0.1, 0.1, 0.1), 3).tolist() == [0, 0, 0]


@found
def group_of_one_accepted():
    try:
        advantages = group_advantages(float64(1, 0), 1, scale="none")
    except ValueError:
        return
    raise AssertionError(f"accepted, with advantages {advantages.tolist()}")


@found
def advantages_along_the_tokens():
    """Silent wherever there are as many rows as columns."""
    _, gradient = loss_at([[1, 1], [1, 1]], advantages=[1, -1])
    assert_close(gradient, float64([-0.25, -0.25], [0.25, 0.25]))


@found
def advantages_not_detached():
    """Only visible where the reward is a differentiable function, such as a KL penalty."""
    log_probs, advantages = float64([-1.0]).requires_grad_(), float64(1).requires_grad_()
    loss, _ = grpo_loss(log_probs, None, advantages, torch.ones(1, 1))
    loss.backward()
    assert advantages.grad is None


@found
def loss_minimises_the_objective():
    """A good token becomes likelier: against a negative slope."""
    _, gradient = loss_at([[1.0]], advantages=[1])
    assert gradient.item() < 0


# ---------------------------------------------------------------------------------------------


def test_every_mistake_has_its_check_and_a_sentence():
    names = [mistake.name for mistake in MISTAKES]
    assert names == list(CHECKS) and len(set(names)) == len(names) == 38
    for mistake in MISTAKES:
        assert mistake.sentence.endswith(".") and len(mistake.sentence) > 40


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_check_passes_without_the_mistake_and_fails_with_it(mistake):
    check, function = CHECKS[mistake.name], getattr(objective, mistake.function)
    check()
    with mutated(function, mistake.line, mistake.instead), pytest.raises(AssertionError):
        check()
    check()
