"""The ratio of two policies: its levels, its gradient, and nothing from under the mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import GARBAGE, must_fail_on, ragged_masks, uniform
from torch import Tensor
from torch.testing import assert_close

from minigrpo.objective import LEVELS, _ratio, _unmask, policy_ratio


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
    (_ratio, "total = total / _count(mask, dim=-1)[:, None]", "total = total / mask.shape[-1]"),
    (_ratio, "total = log_ratio.sum(dim=-1, keepdim=True)", "total = log_ratio.mean(-1)[:, None]"),
)
@given(ragged_masks())
def test_every_level_equals_its_definition(mask):
    new, old = uniform(*mask.shape, seed=1), uniform(*mask.shape, seed=2)
    for level in LEVELS:
        ratio = policy_ratio(new, old, mask, level=level)
        assert_close(ratio, ratio_by_loops(new, old, mask, level))


@must_fail_on((_ratio, "return log_ratio.exp()", "return (-log_ratio).exp()"))
def test_the_ratio_is_new_over_old():
    new, old = torch.tensor([[0.6, 0.2]]).log(), torch.tensor([[0.2, 0.4]]).log()
    assert_close(policy_ratio(new, old, torch.ones(1, 2)), torch.tensor([[3.0, 0.5]]))


@must_fail_on(
    (_unmask, "return torch.where(mask.bool(), values, 0.0)", "return values * mask"),
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


@must_fail_on(
    (_ratio, "return total.exp()", "return total.detach().exp()"),
    (_ratio, "return log_ratio.exp()", "return log_ratio.detach().exp()"),
)
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


# ---------------------------------------------------------------------------------------------
# bad input

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
    with pytest.raises(ValueError, match="mask: expected at least one real token .* row 0"):
        policy_ratio(ROW, ROW, ROW, level=level)
