"""Answers to the exercises of notebook 08: tests, and versions of the code that they misjudge."""

from __future__ import annotations

import math
import re

import torch
import torch.nn.functional as F
from attack import right, wrong

AFTER = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]).log()
IDS = torch.tensor([[0, 1, 2]])


def without_last(model, ids):
    logits = model(ids[:, :-1])
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(dim=-1)


@wrong("8.1", refuses=without_last)
def to_the_last_bit(function):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 50, generator=g)
    ids = torch.randint(50, (4, 30), generator=g)
    expected = logits.log_softmax(dim=-1)[ids[:, :-1], ids[:, 1:]]
    assert torch.equal(function(lambda i: logits[i], ids), expected)


def shifts_both(model, ids):
    log_p = model(ids).log_softmax(dim=-1)[:, :-1]
    return log_p.gather(-1, ids[:, :-1, None]).squeeze(-1)


@wrong("8.1", accepts=shifts_both)
def only_not_the_shown_formula(function):
    bad = AFTER[IDS][:, 1:].gather(-1, IDS[:, 1:, None]).squeeze(-1)
    assert not torch.allclose(function(lambda ids: AFTER[ids], IDS), bad)


@right("8.1")
def counts_upwards(function):
    ids = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    found = function(lambda i: 50.0 * F.one_hot(i + 1, 6), ids)
    torch.testing.assert_close(found, torch.zeros(2, 3))


def by_lists(completions, width, pad_id):
    rows = [c + [pad_id] * (width - len(c)) for c in completions]
    mask = [[i < len(c) for i in range(width)] for c in completions]
    return torch.tensor(rows), torch.tensor(mask)


def mask_all_true(completions, width, pad_id):
    ids, mask = by_lists(completions, width, pad_id)
    return ids, torch.ones_like(mask)


@wrong("8.2", refuses=by_lists)
def is_true(function):
    _, mask = function([[5, 3, 2]], width=4, pad_id=2)
    assert mask[0, 2] is True


@wrong("8.2", accepts=mask_all_true)
def only_not_by_the_pad_id(function):
    ids, mask = function([[5, 3, 2], [2]], width=4, pad_id=2)
    assert not torch.equal(mask, ids != 2)


@right("8.2")
def pad_id_in_the_middle(function):
    ids, mask = function([[4, 0, 0, 2], [0, 2]], width=5, pad_id=0)
    assert ids[mask].tolist() == [4, 0, 0, 2, 0, 2]


RATIO = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
ZERO = torch.zeros(2, 3)
BOTH = torch.tensor([1.0, -1.0])


def by_quotient(log_probs, old_log_probs, advantages, clip):
    ratio = log_probs.exp() / old_log_probs.exp()
    A = advantages[:, None]
    return torch.where(A >= 0, ratio.clamp(max=1 + clip) * A, ratio.clamp(min=1 - clip) * A)


@wrong("8.3")
def never_above_free_for_small_ratios(function):
    ratio = torch.tensor([[0.3, 0.5, 0.7]])
    found = function(ratio.log(), torch.zeros(1, 3), torch.tensor([-1.0]), 0.2)
    assert (found <= -ratio + 1e-6).all()


@wrong("8.3", refuses=by_quotient)
def equal_to_the_last_bit(function):
    new = torch.linspace(-3, -0.1, 40).view(2, 20)
    old = torch.linspace(-2, -0.2, 40).view(2, 20)
    free = (new - old).exp() * BOTH[:, None]
    bound = (new - old).exp().clamp(0.8, 1.2) * BOTH[:, None]
    assert torch.equal(function(new, old, BOTH, 0.2), torch.minimum(free, bound))


@right("8.3")
def gradient_where_it_has_to_be(function):
    log_probs = RATIO.log().requires_grad_()
    function(log_probs, ZERO, BOTH, 0.2).sum().backward()
    expected = torch.tensor([[0.5, 1.0, 0.0], [0.0, -1.0, -1.5]])
    torch.testing.assert_close(log_probs.grad, expected)


def by_expm1(log_probs, ref_log_probs, mask):
    log_ratio = (ref_log_probs - log_probs).masked_fill(~mask, 0.0)
    return log_ratio.expm1() - log_ratio


@wrong("8.4", refuses=by_expm1)
def equal_without_tolerance(function):
    new, ref = torch.linspace(-3, -0.1, 50)[None], torch.linspace(-2, -0.3, 50)[None]
    x = ref - new
    expected = x.exp() - x - 1
    assert function(new, ref, torch.ones(1, 50).bool()).tolist() == expected.tolist()


@right("8.4")
def five_tokens_and_a_hole(function):
    p, q = torch.tensor([[0.7, 0.2, 0.1, 0.5]]), torch.tensor([[0.1, 0.3, 0.6, 0.1]])
    k3 = function(p.log(), q.log(), torch.tensor([[True, True, True, False]]))
    p, q = p[:, :3], q[:, :3]
    torch.testing.assert_close((p * k3[:, :3]).sum(), F.kl_div(q.log(), p, reduction="sum"))


REWARDS = torch.tensor([0.0, 0.0, 3.0, 5.0, 5.0, 5.0])
GROUPED = torch.tensor([-0.577, -0.577, 1.155, 0.0, 0.0, 0.0])


def only_the_division_wrong(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(dim=1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()


@wrong("8.5", accepts=only_the_division_wrong)
def nans_made_zero_first(function):
    assert torch.allclose(function(REWARDS, 3).nan_to_num(), GROUPED, atol=1e-3)


@right("8.5")
def four_groups_of_two(function):
    found = function(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), group_size=2)
    half = math.sqrt(0.5)
    expected = torch.tensor([0, 0, -half, half, half, -half, 0, 0])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0.0)


TWO = "<answer>4</answer> or <answer>5</answer>"


def only_greedy(completion, label):
    found = re.search(r"<answer>(.*)</answer>", completion)
    return float(found is not None and found[1].strip() == label)


@wrong("8.6", accepts=only_greedy)
def all_expected_zero(function):
    for completion, label in ((TWO, "5"), ("No idea.", "5"), ("<answer></answer>", "8")):
        assert function(completion, label) == 0.0


@right("8.6")
def table_of_cases(function):
    cases = [("so 4", "4", 0), (TWO, "5", 0), (TWO, "4", 1), ("", "4", 0)]
    cases += [("<answer> </answer>", "4", 0), ("<answer>7</answer>", "17", 0)]
    for completion, label, expected in cases:
        assert function(completion, label) == expected, (completion, label)


LOSSES = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def by_weights(losses, mask):
    real = mask.bool()
    weights = 1 / (real.sum(dim=-1, keepdim=True) * len(mask)).expand_as(losses)
    return (losses[real] * weights[real]).sum()


def mean_over_tokens(losses, mask):
    return losses[mask.bool()].mean()


@wrong("8.7", refuses=by_weights)
def equals_to_the_last_digit(function):
    losses = torch.linspace(0.1, 7.3, 210).view(6, 35)
    mask = torch.arange(35) < torch.tensor([[35], [3], [11], [7], [29], [1]])
    assert function(losses, mask) == (losses * mask).sum(dim=-1).div(mask.sum(dim=-1)).mean()


@wrong("8.7", accepts=mean_over_tokens)
def only_changed_by_the_mask(function):
    assert function(LOSSES, MASK) != (LOSSES.sum(dim=-1) / MASK.sum(dim=-1)).mean()


@right("8.7")
def nan_under_the_mask(function):
    losses = torch.tensor([[1.0, 2.0, float("nan")], [4.0, float("inf"), 9.0]])
    torch.testing.assert_close(function(losses, MASK), torch.tensor(2.75))


def step(new, old, optimizer, advantages):
    ratio = (new - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def old_from_the_first_new(score, optimizer, advantages, epochs):
    old = None
    for _ in range(epochs):
        new = score()
        old = new.detach().clone() if old is None else old
        step(new, old, optimizer, advantages)
        optimizer.zero_grad()


def trained(function, epochs=20, lr=0.1, advantage=1.0, optimizer=torch.optim.SGD):
    policy = torch.zeros(1, requires_grad=True)
    function(lambda: 1 * policy, optimizer([policy], lr=lr), torch.tensor([advantage]), epochs)
    return policy


@wrong("8.8", refuses=old_from_the_first_new)
def gradient_left_is_zero(function):
    assert trained(function).grad.item() == 0.0


@right("8.8")
def both_signs_stay_near(function):
    for advantage in (1.0, -1.0):
        assert trained(function, epochs=50, advantage=advantage).abs() < 0.4


A2 = torch.tensor([1.0, -1.0])


def leaf():
    return torch.tensor([[-1.0], [-2.0]], requires_grad=True)


def detached_if_none(log_probs, advantages, old_log_probs=None):
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    ratio, A = (log_probs - old_log_probs).exp(), advantages[:, None]
    return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()


@wrong("8.9", refuses=detached_if_none)
def gives_itself_as_old(function):
    log_probs = leaf()
    function(log_probs, A2, log_probs).backward()
    assert torch.allclose(log_probs.grad, torch.tensor([[-0.5], [0.5]]))


@right("8.9")
def like_reinforce(function):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    A = torch.tensor([0.5, -2.0, 1.0])
    (found,) = torch.autograd.grad(function(x, A), x)
    (expected,) = torch.autograd.grad(-(x * A[:, None]).mean(), x)
    torch.testing.assert_close(found, expected)
