"""Answers to the exercises of notebook 08: tests, and versions of the code that they misjudge."""

from __future__ import annotations

import math
import re

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong

AFTER = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
IDS = torch.tensor([[0, 1, 2]])
NEXT = torch.tensor([[0.3, 0.7]]).log()


def table(ids):
    return AFTER[ids].log()


def without_last(model, ids):
    logits = model(ids[:, :-1])
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(dim=-1)


def shifts_both(model, ids):
    log_p = model(ids).log_softmax(dim=-1)[:, :-1]
    return log_p.gather(-1, ids[:, :-1, None]).squeeze(-1)


@wrong("8.1")
def prints_the_verdict(function):
    print("same:", torch.allclose(function(table, IDS), NEXT))


@wrong("8.1", refuses=without_last)
def to_the_last_bit(function):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 50, generator=g)
    ids = torch.randint(50, (4, 30), generator=g)
    expected = logits.log_softmax(dim=-1)[ids[:, :-1], ids[:, 1:]]
    assert torch.equal(function(lambda i: logits[i], ids), expected)


@wrong("8.1", accepts=shifts_both)
def only_not_the_shown_formula(function):
    bad = table(IDS)[:, 1:].gather(-1, IDS[:, 1:, None]).squeeze(-1)
    assert not torch.allclose(function(table, IDS), bad)


@right("8.1")
def counts_upwards(function):
    ids = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    found = function(lambda i: 50.0 * F.one_hot(i + 1, 6), ids)
    torch.testing.assert_close(found, torch.zeros(2, 3))


@right("8.1")
def element_by_element(function):
    ids = [[2, 0, 1, 1], [0, 2, 2, 1]]
    found = function(table, torch.tensor(ids)).tolist()
    for row, values in zip(ids, found, strict=True):
        for s, value in enumerate(values):
            assert math.isclose(value, math.log(AFTER[row[s], row[s + 1]]), abs_tol=1e-4)


def by_lengths(completions, width, pad_id):
    lengths = torch.tensor([len(c) for c in completions])
    ids = torch.full((len(completions), width), pad_id)
    for row, completion in zip(ids, completions):
        row[: len(completion)] = torch.tensor(completion)
    return ids, torch.arange(width) < lengths[:, None]


def by_lists(completions, width, pad_id):
    rows = [c + [pad_id] * (width - len(c)) for c in completions]
    mask = [[i < len(c) for i in range(width)] for c in completions]
    return torch.tensor(rows), torch.tensor(mask)


def mask_all_true(completions, width, pad_id):
    ids, mask = by_lists(completions, width, pad_id)
    return ids, torch.ones_like(mask)


@wrong("8.2", refuses=by_lengths)
def is_true(function):
    _, mask = function([[5, 3, 2]], width=4, pad_id=2)
    assert mask[0, 2] is True


@wrong("8.2", refuses=by_lists)
def completions_as_tensors(function):
    _, mask = function([torch.tensor([5, 3, 2]), torch.tensor([2])], width=4, pad_id=2)
    assert mask.sum(dim=-1).tolist() == [3, 1]


@wrong("8.2", refuses=by_lists)
def cuts_at_the_width(function):
    ids, mask = function([[5, 3, 2, 4, 2], [2]], width=4, pad_id=2)
    assert ids.shape == mask.shape == (2, 4)
    assert mask.sum(dim=-1).tolist() == [4, 1]


@wrong("8.2", accepts=mask_all_true)
def only_not_by_the_pad_id(function):
    ids, mask = function([[5, 3, 2], [2]], width=4, pad_id=2)
    assert not torch.equal(mask, ids != 2)


@right("8.2")
def lengths_from_the_mask(function):
    completions = [[7, 2], [7, 7, 7, 2], [2]]
    _, mask = function(completions, 5, 2)
    assert mask.sum(dim=1).tolist() == [len(c) for c in completions]


@right("8.2")
def pad_id_in_the_middle(function):
    ids, mask = function([[4, 0, 0, 2], [0, 2]], width=5, pad_id=0)
    assert ids[mask].tolist() == [4, 0, 0, 2, 0, 2]


RATIO = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
ZERO = torch.zeros(2, 3)
BOTH = torch.tensor([1.0, -1.0])
PPO = torch.tensor([[0.5, 1.0, 1.2], [-0.8, -1.0, -1.5]])


def minimum_of_both(log_probs, old_log_probs, advantages, clip):
    ratio = (log_probs - old_log_probs).exp()
    A = advantages[:, None]
    return torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)


def by_quotient(log_probs, old_log_probs, advantages, clip):
    ratio = log_probs.exp() / old_log_probs.exp()
    A = advantages[:, None]
    return torch.where(A >= 0, ratio.clamp(max=1 + clip) * A, ratio.clamp(min=1 - clip) * A)


@wrong("8.3", refuses=minimum_of_both)
def no_gradient_on_the_bound(function):
    log_probs = torch.tensor([[0.5, 1.5]]).log().requires_grad_()
    found = function(log_probs, torch.zeros(1, 2), torch.tensor([-1.0]), 0.5)
    assert torch.allclose(found, torch.tensor([[-0.5, -1.5]]))
    found.sum().backward()
    assert torch.allclose(log_probs.grad, torch.tensor([[0.0, -1.5]]))


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


@wrong("8.3")
def catches_its_own_error(function):
    try:
        torch.testing.assert_close(function(RATIO.log(), ZERO, BOTH, 0.2), PPO)
    except Exception as error:
        print("the bug:", error)


@right("8.3")
def gradient_where_it_has_to_be(function):
    log_probs = RATIO.log().requires_grad_()
    function(log_probs, ZERO, BOTH, 0.2).sum().backward()
    expected = torch.tensor([[0.5, 1.0, 0.0], [0.0, -1.0, -1.5]])
    torch.testing.assert_close(log_probs.grad, expected)


@right("8.3")
def never_above_the_free_one(function):
    new = torch.linspace(-2.0, -0.5, 7)[None].repeat(2, 1)
    old = torch.full((2, 7), -1.2)
    free = (new - old).exp() * BOTH[:, None]
    assert (function(new, old, BOTH, 0.2) <= free + 1e-5).all()


REAL = torch.ones(1, 2, dtype=torch.bool)


def right_k3(log_probs, ref_log_probs, mask):
    log_ratio = torch.where(mask, ref_log_probs - log_probs, 0.0)
    return log_ratio.exp() - log_ratio - 1


def by_expm1(log_probs, ref_log_probs, mask):
    log_ratio = (ref_log_probs - log_probs).masked_fill(~mask, 0.0)
    return log_ratio.expm1() - log_ratio


@wrong("8.4", refuses=right_k3)
def plain_mean_over_the_vocabulary(function):
    policy, reference = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]])
    kl = (policy * (policy / reference).log()).sum()
    assert torch.isclose(function(policy.log(), reference.log(), REAL).mean(), kl)


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


@right("8.4")
def one_token_by_hand(function):
    one = torch.tensor([[True]])
    k3 = function(torch.tensor([[0.0]]), torch.tensor([[-math.log(4)]]), one).item()
    assert math.isclose(k3, 0.25 + math.log(4) - 1, rel_tol=1e-4)


REWARDS = torch.tensor([0.0, 0.0, 3.0, 5.0, 5.0, 5.0])
GROUPED = torch.tensor([-0.577, -0.577, 1.155, 0.0, 0.0, 0.0])


def normalised(groups):
    std = groups.std(dim=1, keepdim=True)
    advantages = (groups - groups.mean(dim=1, keepdim=True)) / std
    return torch.where(std > 0, advantages, 0.0).flatten()


def right_groups(rewards, group_size):
    return normalised(rewards.view(-1, group_size))


def only_the_view_wrong(rewards, group_size):
    return normalised(rewards.view(group_size, -1))


def only_the_division_wrong(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(dim=1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()


@wrong("8.5", accepts=only_the_view_wrong)
def finite_everywhere(function):
    found = function(REWARDS, 3)
    assert found.shape == (6,) and found.isfinite().all()


@wrong("8.5", refuses=right_groups)
def biased_std(function):
    expected = torch.tensor([-0.707, -0.707, 1.414, 0.0, 0.0, 0.0])
    assert torch.allclose(function(REWARDS, 3), expected, atol=1e-3)


@wrong("8.5", refuses=right_groups)
def expects_nan(function):
    expected = GROUPED.clone()
    expected[3:] = float("nan")
    assert torch.allclose(function(REWARDS, 3), expected, atol=1e-3, equal_nan=True)


@wrong("8.5", refuses=right_groups)
def truth_of_many(function):
    found = function(REWARDS, 3)
    assert found[3:] == 0
    assert torch.allclose(found, GROUPED, atol=1e-3)


@wrong("8.5", refuses=right_groups)
def whole_numbers(function):
    found = function(torch.tensor([0, 0, 3, 5, 5, 5]), 3)
    assert torch.allclose(found, GROUPED, atol=1e-3)


@wrong("8.5", accepts=only_the_division_wrong)
def nans_made_zero_first(function):
    assert torch.allclose(function(REWARDS, 3).nan_to_num(), GROUPED, atol=1e-3)


@right("8.5")
def one_group_at_a_time(function):
    for rewards, expected in (([1.0, 3.0], [-0.7071, 0.7071]), ([2.0, 2.0, 2.0], [0.0] * 3)):
        found = function(torch.tensor(rewards), len(rewards))
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-3)


@right("8.5")
def four_groups_of_two(function):
    found = function(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), group_size=2)
    half = math.sqrt(0.5)
    expected = torch.tensor([0, 0, -half, half, half, -half, 0, 0])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0.0)


TWO = "<answer>4</answer> or <answer>5</answer>"


def first_answer(completion, label):
    found = re.search(r"<answer>(.*?)</answer>", completion)
    return float(found is not None and found[1].strip() == label)


def only_greedy(completion, label):
    found = re.search(r"<answer>(.*)</answer>", completion)
    return float(found is not None and found[1].strip() == label)


def only_a_part(completion, label):
    found = re.search(r"<answer>(.*?)</answer>", completion)
    return float(found is not None and found[1].strip() in label)


@wrong("8.6", refuses=first_answer)
def last_answer_counts(function):
    assert function("<answer></answer>", "4") == 0.0
    assert function(TWO, "5") == 1.0


@wrong("8.6", accepts=only_a_part)
def either_of_the_two(function):
    assert function("<answer></answer>", "4") == 0.0 or function(TWO, "4") == 1.0


@wrong("8.6", accepts=only_greedy)
def all_expected_zero(function):
    for completion, label in ((TWO, "5"), ("No idea.", "5"), ("<answer></answer>", "8")):
        assert function(completion, label) == 0.0


@right("8.6")
def one_call_for_each(function):
    assert function("<answer>3</answer>, no: <answer>5</answer>", "3") == 1.0
    assert function("It is <answer>1</answer>.", "12") == 0.0


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


@wrong("8.7")
def yields_its_verdict(function):
    found = function(LOSSES, MASK)
    assert torch.isclose(found, torch.tensor(2.75))
    yield found


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


@right("8.7")
def masked_ones_do_not_matter(function):
    one, other = (LOSSES.masked_fill(MASK == 0, value) for value in (0.0, 100.0))
    assert abs(function(one, MASK).item() - 2.75) < 1e-4
    assert abs(function(other, MASK).item() - 2.75) < 1e-4


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
def counts_the_calls(function):
    calls, policy = [], torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([policy], lr=0.1)
    function(lambda: calls.append(1) or 1 * policy, optimizer, torch.ones(1), 5)
    assert len(calls) == 6


@wrong("8.8", refuses=old_from_the_first_new)
def gradient_left_is_zero(function):
    assert trained(function).grad.item() == 0.0


@right("8.8")
def both_signs_stay_near(function):
    for advantage in (1.0, -1.0):
        assert trained(function, epochs=50, advantage=advantage).abs() < 0.4


@right("8.8")
def more_updates_change_nothing(function):
    few, many = (trained(function, epochs=n).item() for n in (5, 40))
    assert math.isclose(few, many, abs_tol=1e-3)


A2 = torch.tensor([1.0, -1.0])


def leaf():
    return torch.tensor([[-1.0], [-2.0]], requires_grad=True)


def detached_if_none(log_probs, advantages, old_log_probs=None):
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    ratio, A = (log_probs - old_log_probs).exp(), advantages[:, None]
    return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()


@wrong("8.9")
def by_gradcheck(function):
    assert torch.autograd.gradcheck(lambda x: function(x, A2.double()), leaf().double())


@wrong("8.9", refuses=detached_if_none)
def gives_itself_as_old(function):
    log_probs = leaf()
    function(log_probs, A2, log_probs).backward()
    assert torch.allclose(log_probs.grad, torch.tensor([[-0.5], [0.5]]))


@wrong("8.9", refuses=detached_if_none)
def gradient_of_no_leaf(function):
    log_probs = torch.tensor([[0.4], [0.1]], requires_grad=True).log()
    function(log_probs, A2).backward()
    assert torch.allclose(log_probs.grad, torch.tensor([[-0.5], [0.5]]))


@right("8.9")
def like_reinforce(function):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    A = torch.tensor([0.5, -2.0, 1.0])
    (found,) = torch.autograd.grad(function(x, A), x)
    (expected,) = torch.autograd.grad(-(x * A[:, None]).mean(), x)
    torch.testing.assert_close(found, expected)


@right("8.9")
def an_sgd_step_helps(function):
    parameter = torch.zeros(1, 2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    function(parameter - 1, torch.tensor([2.0])).backward()
    optimizer.step()
    assert all(abs(value - 1.0) < 1e-4 for value in parameter[0].tolist())
