"""Answers to the exercises of notebook 07: tests, and versions of the code they go wrong on."""

from __future__ import annotations

import contextlib
import re
import unittest

import numpy as np
import torch
from attack import right, wrong
from torch.testing import assert_close

# 7.1: log-probs of the tokens
AFTER = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])  # row a: after token a
IDS = torch.tensor([[0, 1, 2]])
NEXT = torch.tensor([[0.3, 0.7]]).log()


def bigram(ids):
    return AFTER[ids].log()


def cut_before(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def minus_logsumexp(model, ids):
    logits = model(ids)[:, :-1]
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)


def each_prefix(model, ids):
    last = [model(ids[:, :s])[:, -1].log_softmax(-1) for s in range(1, ids.shape[1])]
    return torch.stack(last, dim=1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def gathers_the_token_before(model, ids):
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, :-1, None]).squeeze(-1)


@wrong("7.1")
def returns_the_comparison(function):
    return torch.allclose(function(bigram, IDS), NEXT)


@wrong("7.1")
def shape_and_sign(function):
    found = function(bigram, IDS)
    assert found.shape == (1, 2) and (found <= 0).all()


@wrong("7.1")
def one_distribution_everywhere(function):
    found = function(lambda ids: AFTER[0].log().expand(*ids.shape, 3), IDS)
    assert_close(found, AFTER[0, 1:].log()[None])


@wrong("7.1")
def text_of_one_letter(function):
    assert_close(function(bigram, torch.tensor([[1, 1, 1, 1]])), torch.full((1, 3), 0.2).log())


@wrong("7.1", refuses=cut_before)
def model_that_wants_the_whole_row(function):
    def model(ids):
        assert ids.shape == IDS.shape
        return bigram(ids)

    assert_close(function(model, IDS), NEXT)


@wrong("7.1", refuses=minus_logsumexp)
def to_the_last_bit(function):
    torch.manual_seed(0)
    table, ids = torch.randn(7, 7), torch.randint(7, (4, 9))
    expected = table[ids].log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    assert torch.equal(function(lambda ids: table[ids], ids), expected)


@wrong("7.1", refuses=cut_before)
def the_token_after_itself(function):
    assert_close(function(bigram, IDS), torch.tensor([[0.2, 0.1]]).log())


@wrong("7.1", refuses=cut_before)
def forgets_the_log(function):
    assert_close(function(bigram, IDS), NEXT.exp())


@wrong("7.1", accepts=gathers_the_token_before)
def differs_from_the_shown(function):
    assert not torch.allclose(function(bigram, IDS), torch.tensor([[0.2, 0.1]]).log())


@wrong("7.1")
def catches_its_own(function):
    try:
        assert torch.allclose(function(bigram, IDS), NEXT)
    except AssertionError as error:
        print("bug found", error)


@right("7.1")
def counts_upwards(function):
    def model(ids):  # certain: after t comes t + 1
        return 50 * torch.nn.functional.one_hot((ids + 1) % 6, 6).float()

    found = function(model, torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5]]))
    assert found.shape == (2, 3) and found.abs().max() < 1e-4


@right("7.1")
def loop_over_the_text(function):
    ids = [2, 0, 0, 1, 2, 1]
    found = function(bigram, torch.tensor([ids]))[0].tolist()
    for before, after, value in zip(ids[:-1], ids[1:], found, strict=True):
        assert abs(value - AFTER[before, after].log().item()) < 1e-5, (before, after)


@right("7.1")
def seeded_and_independent(function):
    torch.manual_seed(1)
    table, ids = torch.randn(5, 5, dtype=torch.float64), torch.randint(5, (3, 6))
    p = table.exp() / table.exp().sum(-1, keepdim=True)
    assert_close(function(lambda ids: table[ids], ids), p[ids[:, :-1], ids[:, 1:]].log())


@right("7.1")
def by_position(function):
    logits = torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 5.0]])
    found = function(lambda ids: logits[: ids.shape[1]].repeat(len(ids), 1, 1), IDS.clamp(max=1))
    np.testing.assert_allclose(found.numpy(), [[-np.log1p(np.exp(-2)), -np.log1p(np.e)]], 1e-5)


# 7.2: mask of the completions
FULL = [[True, True, True, False], [True, False, False, False]]


def full_and_arange(completions, width, pad_id):
    ids = torch.full((len(completions), width), pad_id)
    for row, completion in zip(ids, completions):
        row[: len(completion)] = torch.tensor(completion)
    return ids, torch.arange(width) < torch.tensor([[len(c)] for c in completions])


def two_lists(completions, width, pad_id):
    ids = [c + [pad_id] * (width - len(c)) for c in completions]
    return torch.tensor(ids), torch.tensor(
        [[i < len(c) for i in range(width)] for c in completions]
    )


def true_everywhere(completions, width, pad_id):
    ids, mask = two_lists(completions, width, pad_id)
    return ids, torch.ones_like(mask)


@wrong("7.2")
def padding_of_its_own(function):
    ids, mask = function([[5, 3, 2], [2]], 4, 0)
    assert ids.tolist() == [[5, 3, 2, 0], [2, 0, 0, 0]] and mask.tolist() == FULL


@wrong("7.2")
def looks_at_the_ids_only(function):
    ids, _ = function([[5, 3, 2], [2]], 4, 2)
    assert ids.tolist() == [[5, 3, 2, 2], [2, 2, 2, 2]]


@wrong("7.2")
def shapes_and_type(function):
    ids, mask = function([[5, 3, 2], [2]], 4, 2)
    assert ids.shape == mask.shape == (2, 4) and mask.dtype == torch.bool


@wrong("7.2", refuses=two_lists)
def eos_is_no_token(function):
    _, mask = function([[5, 3, 2], [2]], 4, 2)
    assert mask.tolist() == [[True, True, False, False], [False] * 4]


@wrong("7.2", refuses=two_lists)
def pad_before_width(function):
    ids, mask = function([[5, 2], [2]], 2, 4)  # padded with 2 to four columns
    assert mask.tolist() == [[True, True, False, False], [True, False, False, False]]


@wrong("7.2")
def nothing_to_pad(function):
    _, mask = function([[5, 3, 4, 1], [1, 1, 3, 4]], 4, 2)
    assert mask.all()


@wrong("7.2", refuses=two_lists)
def completions_as_tensors(function):
    _, mask = function([torch.tensor([5, 3, 2]), torch.tensor([2])], 4, 2)
    assert mask.tolist() == FULL


@wrong("7.2", refuses=two_lists)
def mask_of_integers(function):
    _, mask = function([[5, 3, 2], [2]], 4, 2)
    assert_close(mask, torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]))


@wrong("7.2")
def only_behind_the_end(function):
    _, mask = function([[5, 3, 2], [2]], 4, 2)
    assert not mask[0, 3:].any() and not mask[1, 1:].any()


@wrong("7.2")
def formula_of_the_shown(function):
    ids, mask = function([[5, 3, 2], [2]], 4, 2)
    assert torch.equal(mask, ids != 2)


PAIRS = zip(([[5, 3, 2]], [[2]]), ([[True, True, True, False]], [[True, False, False, False]]))


@wrong("7.2")
def cases_used_up_by_the_first_call(function):
    for completions, expected in PAIRS:
        assert function(completions, 4, 2)[1].tolist() == expected


@right("7.2")
def counts_per_row(function):
    _, mask = function([[7, 7, 1, 7], [1, 7], [7]], width=6, pad_id=7)
    assert mask.sum(-1).tolist() == [4, 2, 1]


@right("7.2")
def every_length(function):
    for n in range(1, 6):
        _, mask = function([[0] * n], 5, 0)
        assert mask.tolist() == [[True] * n + [False] * (5 - n)], n


@right("7.2")
def mask_gives_back_the_completions(function):
    completions = [[4, 0, 9, 0], [3], [0, 0]]
    ids, mask = function([list(c) for c in completions], 5, 0)
    assert [row[real].tolist() for row, real in zip(ids, mask, strict=True)] == completions


@right("7.2")
def with_unittest(function):
    ids, mask = function([[5, 3, 2], [2]], 4, 2)
    unittest.TestCase().assertEqual(mask.int().tolist(), [[1, 1, 1, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(ids.numpy()[1], np.full(4, 2))


# 7.3: clipped objective
RATIO = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
BOTH = torch.tensor([1.0, -1.0])
CLIPPED = torch.tensor([[0.5, 1.0, 1.2], [-0.8, -1.0, -1.5]])
NONE = torch.zeros(2, 3)


def plain_minimum(log_probs, old_log_probs, advantages, clip):
    ratio, A = (log_probs - old_log_probs).exp(), advantages[:, None]
    return torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)


def quotient(log_probs, old_log_probs, advantages, clip):
    ratio, A = log_probs.exp() / old_log_probs.exp(), advantages[:, None]
    return torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)


def with_einsum(log_probs, old_log_probs, advantages, clip):
    ratio = (log_probs - old_log_probs).exp()
    both = torch.stack([ratio, ratio.clamp(1 - clip, 1 + clip)])
    return torch.einsum("knt,n->knt", both, advantages).amin(0)


def never_clipped(log_probs, old_log_probs, advantages, clip):
    return (log_probs - old_log_probs).exp() * advantages[:, None]


@wrong("7.3")
def good_completions_only(function):
    found = function(RATIO.log(), NONE, torch.tensor([1.0, 2.0]), 0.2)
    assert_close(found, torch.tensor([[0.5, 1.0, 1.2], [1.0, 2.0, 2.4]]))


@wrong("7.3")
def both_signs_inside_the_clip(function):
    ratio = torch.tensor([[0.9, 1.0, 1.1], [0.9, 1.0, 1.1]])
    assert_close(function(ratio.log(), NONE, BOTH, 0.2), ratio * BOTH[:, None])


@wrong("7.3", refuses=plain_minimum)
def negative_is_the_mirror(function):
    negative = function(RATIO.log(), NONE, -BOTH, 0.2)
    assert_close(function(RATIO.log(), NONE, BOTH, 0.2), -negative)


@wrong("7.3", refuses=plain_minimum)
def expects_the_loss(function):
    assert_close(function(RATIO.log(), NONE, BOTH, 0.2), -CLIPPED)


@wrong("7.3", refuses=with_einsum)
def advantages_as_a_column(function):
    found = function(RATIO[:1].log(), NONE[:1], torch.tensor([[-1.0]]), 0.2)
    assert torch.allclose(found, CLIPPED[1:])


@wrong("7.3", refuses=quotient)
def bitwise(function):
    torch.manual_seed(0)
    new, old, A = torch.randn(3, 5) - 2, torch.randn(3, 5) - 2, torch.tensor([1.0, -2.0, 0.3])
    ratio = (new - old).exp()
    expected = torch.minimum(ratio * A[:, None], ratio.clamp(0.8, 1.2) * A[:, None])
    assert torch.equal(function(new, old, A, 0.2), expected)


@wrong("7.3", refuses=plain_minimum)
def ratios_in_place_of_log_probs(function):
    assert_close(function(RATIO, torch.ones(2, 3), BOTH, 0.2), CLIPPED)


@wrong("7.3", refuses=plain_minimum)
def old_before_new(function):
    assert_close(function(NONE, RATIO.log(), BOTH, 0.2), CLIPPED)


@wrong("7.3")
def difference_without_abs(function):
    assert (CLIPPED - function(RATIO.log(), NONE, BOTH, 0.2)).max() < 1e-6


@wrong("7.3", refuses=plain_minimum)
def gradient_on_the_bound(function):
    new = torch.tensor([[0.5]], dtype=torch.float64).log().requires_grad_()
    function(new, torch.zeros(1, 1, dtype=torch.float64), -BOTH[:1].double(), 0.5).sum().backward()
    assert new.grad.item() == 0


@wrong("7.3")
def gradcheck_alone(function):
    new = RATIO.double().log().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, NONE.double(), BOTH.double(), 0.2), new)


@wrong("7.3")
def unseeded_and_tame(function):
    new = 0.03 * torch.randn(2, 3)
    assert_close(function(new, NONE, BOTH, 0.2), new.exp() * BOTH[:, None])


@wrong("7.3", accepts=never_clipped)
def not_what_the_shown_gives(function):
    found = function(RATIO.log(), NONE, BOTH, 0.2)[1]
    assert not torch.isclose(found, torch.tensor([-0.5, -1.0, -1.2])).all()


@right("7.3")
def loop_with_min(function):
    torch.manual_seed(3)
    new, old, A = torch.randn(4, 6), torch.randn(4, 6), torch.tensor([2.0, -2.0, 0.0, -0.5])
    found = function(new, old, A, 0.3)
    for n, t in torch.cartesian_prod(torch.arange(4), torch.arange(6)).tolist():
        r = (new[n, t] - old[n, t]).exp()
        assert_close(found[n, t], min(r * A[n], max(min(r, r * 0 + 1.3), r * 0 + 0.7) * A[n]))


@right("7.3")
def gradient_of_a_bad_token(function):
    new = torch.tensor([[0.5, 1.5]]).log().requires_grad_()
    function(new, torch.zeros(1, 2), torch.tensor([-1.0]), 0.2).sum().backward()
    assert_close(new.grad, torch.tensor([[0.0, -1.5]]))  # held below, free above


@right("7.3")
def never_above_either(function):
    found = function(RATIO.log(), NONE, BOTH, 0.2)
    for bound in (RATIO, RATIO.clamp(0.8, 1.2)):
        assert (found <= bound * BOTH[:, None] + 1e-6).all()
    assert torch.allclose(found, CLIPPED)


@right("7.3")
def one_number(function):
    found = function(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([-3.0]), 0.2)
    np.testing.assert_allclose(found.item(), -3 * np.exp(2), rtol=1e-5)


# 7.4: k3, the KL of each token
P, Q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]])
YES = torch.ones(1, 2, dtype=torch.bool)
KL = (P * (P / Q).log()).sum()


def k3(log_probs, ref_log_probs, mask):
    log_ratio = torch.where(mask, ref_log_probs - log_probs, 0.0)
    return log_ratio.exp() - log_ratio - 1


def k3_with_expm1(log_probs, ref_log_probs, mask):
    log_ratio = torch.where(mask, ref_log_probs - log_probs, 0.0)
    return torch.expm1(log_ratio) - log_ratio


def k2(log_probs, ref_log_probs, mask):
    return torch.where(mask, 0.5 * (log_probs - ref_log_probs) ** 2, 0.0)


@wrong("7.4")
def same_policy(function):
    assert_close(function(P.log(), P.log(), YES), torch.zeros(1, 2))


@wrong("7.4")
def never_negative(function):
    assert (function(P.log(), Q.log(), YES) >= 0).all()


@wrong("7.4")
def zero_under_the_mask(function):
    assert function(P.log(), Q.log(), torch.tensor([[True, False]]))[0, 1] == 0


@wrong("7.4", refuses=k3)
def drawn_by_the_reference(function):
    assert_close((Q * function(P.log(), Q.log(), YES)).sum(), (Q * (Q / P).log()).sum())


@wrong("7.4")
def reference_too_near(function):
    near = (P + torch.tensor([[-0.002, 0.002]])).log()
    kl = (P * (P.log() - near)).sum()
    assert torch.isclose((P * function(P.log(), near, YES)).sum(), kl, atol=1e-5)


@wrong("7.4", refuses=k3)
def expects_k1(function):
    assert_close(function(P.log(), Q.log(), YES), P.log() - Q.log())


@wrong("7.4", refuses=k3)
def mean_without_the_probabilities(function):
    assert_close(function(P.log(), Q.log(), YES).mean(), KL)


@wrong("7.4", refuses=k3)
def reference_first(function):
    assert_close((P * function(Q.log(), P.log(), YES)).sum(), KL)


@wrong("7.4", refuses=k3)
def mask_of_floats(function):
    assert_close((P * function(P.log(), Q.log(), torch.ones(1, 2))).sum(), KL)


@wrong("7.4")
def half_of_the_square(function):
    expected = 0.5 * (P.log() - Q.log()) ** 2
    assert_close(function(P.log(), Q.log(), YES), expected, atol=0.6, rtol=0)


@wrong("7.4", refuses=k3_with_expm1)
def exactly_the_formula(function):
    torch.manual_seed(0)
    new, ref = torch.randn(4, 8), torch.randn(4, 8)
    expected = (ref - new).exp() - (ref - new) - 1
    assert (function(new, ref, torch.ones(4, 8) > 0) == expected).all()


@wrong("7.4")
def at_most_the_kl(function):
    assert (P * function(P.log(), Q.log(), YES)).sum() <= KL + 1e-6


@wrong("7.4")
def few_samples_wide_bounds(function):
    drawn = P.multinomial(10, replacement=True)
    found = function(P.log().gather(1, drawn), Q.log().gather(1, drawn), drawn >= 0)
    assert abs(found.mean() - KL) < 1.0


@wrong("7.4", accepts=k2)
def unlike_the_shown(function):
    d = P.log() - Q.log()
    assert not torch.allclose(function(P.log(), Q.log(), YES), d.exp() - d - 1)


@right("7.4")
def three_tokens_in_double(function):
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.3, 0.6]], dtype=torch.float64)
    found = function(p.log(), q.log(), torch.ones(1, 3, dtype=torch.bool))
    assert_close((p * found).sum(), torch.nn.functional.kl_div(q.log(), p, reduction="sum"))


@right("7.4")
def token_by_token(function):
    mask = torch.tensor([[True, True, False]])
    new, ref = torch.tensor([[-1.0, -3.0, -2.0]]), torch.tensor([[-2.0, -1.0, -9.0]])
    expected = [[np.exp(-1) + 1 - 1, np.exp(2) - 2 - 1, 0]]
    np.testing.assert_allclose(function(new, ref, mask).numpy(), expected, rtol=1e-5, atol=1e-6)


@right("7.4")
def gradient_of_k3(function):
    new = Q.log().requires_grad_()
    function(new, P.log(), YES).sum().backward()
    assert_close(new.grad, 1 - P / Q)


@right("7.4")
def many_seeded_samples(function):
    torch.manual_seed(0)
    drawn = P.multinomial(100_000, replacement=True)
    found = function(P.log().gather(1, drawn), Q.log().gather(1, drawn), drawn >= 0).mean()
    assert abs(found - KL) < 0.02, f"{found} is not {KL}"


# 7.5: group advantages
TWO_GROUPS = torch.tensor([0.0, 0.0, 3.0, 5.0, 5.0, 5.0])
SQRT = 3**-0.5
SCALED = torch.tensor([-SQRT, -SQRT, 2 * SQRT, 0.0, 0.0, 0.0])


def by_group(rewards, group_size):
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / groups.std(dim=1, keepdim=True).clamp(min=1e-8)).flatten()


def small_constant(rewards, group_size):
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-8)).flatten()


def divides_by_zero(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).flatten()


def mixes_the_groups(rewards, group_size):
    groups = rewards.view(group_size, -1)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / groups.std(dim=1, keepdim=True).clamp(min=1e-8)).flatten()


@wrong("7.5", accepts=mixes_the_groups)
def as_many_groups_as_members(function):
    found = function(torch.tensor([1.0, 3.0, 5.0, 5.0]), 2)
    assert_close(found, torch.tensor([-(0.5**0.5), 0.5**0.5, 0.0, 0.0]))


@wrong("7.5", accepts=divides_by_zero)
def no_equal_rewards(function):
    found = function(torch.tensor([0.0, 0.0, 3.0, 3.0, 3.0, 0.0]), 3)
    assert_close(found, SQRT * torch.tensor([-1.0, -1.0, 2.0, 1.0, 1.0, -2.0]))


@wrong("7.5", accepts=mixes_the_groups)
def all_equal(function):
    assert_close(function(torch.ones(6), 3), torch.zeros(6))


@wrong("7.5", accepts=divides_by_zero)
def equals_nan(function):
    found = function(TWO_GROUPS, 3)
    assert not (found == float("nan")).any()
    assert_close(found[:3], SCALED[:3])


@wrong("7.5", accepts=divides_by_zero)
def nan_taken_for_zero(function):
    assert_close(function(TWO_GROUPS, 3).nan_to_num(), SCALED)


@wrong("7.5", refuses=by_group)
def std_of_the_population(function):
    expected = torch.tensor([-(0.5**0.5), -(0.5**0.5), 2**0.5, 0, 0, 0])
    assert torch.allclose(function(TWO_GROUPS, 3), expected, atol=1e-3)


@wrong("7.5")
def not_too_large(function):
    assert not function(TWO_GROUPS, 3).abs().max() > 5


@wrong("7.5")
def sum_is_zero(function):
    assert abs(np.nansum(function(TWO_GROUPS, 3).numpy())) < 1e-4


@wrong("7.5", refuses=by_group)
def rewards_and_advantages_in_rows(function):
    assert_close(function(TWO_GROUPS.view(2, 3), 3), SCALED.view(2, 3))


@wrong("7.5", refuses=by_group)
def expects_nan(function):
    expected = [-SQRT, -SQRT, 2 * SQRT] + 3 * [float("nan")]
    np.testing.assert_allclose(function(TWO_GROUPS, 3).numpy(), expected, rtol=1e-4)


@wrong("7.5", refuses=by_group)
def every_second_is_the_group(function):
    found = function(torch.tensor([0.0, 5.0, 0.0, 5.0, 3.0, 5.0]), 3)
    assert_close(found[0::2], SCALED[:3])
    assert_close(found[1::2], torch.zeros(3))


@wrong("7.5", accepts=divides_by_zero)
def either_of_the_two(function):
    mixed, equal = function(torch.tensor([0.0, 0, 3, 3, 3, 0]), 3), function(torch.ones(6), 3)
    assert torch.allclose(mixed[:3], SCALED[:3]) or torch.allclose(equal, torch.zeros(6))


@wrong("7.5", accepts=mixes_the_groups)
def finite(function):
    assert function(TWO_GROUPS, 3).isfinite().all()


@wrong("7.5", refuses=small_constant)
def digit_for_digit(function):
    rewards = 1e-4 * torch.arange(8.0) ** 2
    groups = torch.cat([rewards, torch.zeros(4)]).view(3, 4)
    expected = (groups - groups.mean(1, True)) / groups.std(1, keepdim=True).clamp(min=1e-9)
    assert torch.equal(function(groups.flatten(), 4), expected.flatten())


@right("7.5")
def default_tolerances(function):
    assert_close(function(TWO_GROUPS, 3), SCALED)


@right("7.5")
def group_for_group_with_numpy(function):
    rewards = np.array([[1, 4, 2, 8], [3, 3, 3, 3]], dtype=np.float32)
    found = function(torch.tensor(rewards).flatten(), 4).numpy().reshape(2, 4)
    z = (rewards[0] - rewards[0].mean()) / rewards[0].std(ddof=1)
    np.testing.assert_allclose(found, [z, np.zeros(4)], rtol=1e-4, atol=1e-5)


@right("7.5")
def other_groups_do_not_matter(function):
    first = function(torch.tensor([1.0, 2.0, 2.0, 2.0, 7.0, 1.0]), 2)
    assert_close(first[:2], torch.tensor([-0.70710678, 0.70710678]))
    assert first[2:4].tolist() == [0, 0]
    assert_close(first[4:], torch.tensor([0.70710678, -0.70710678]))


@right("7.5")
def mean_and_std_of_each(function):
    equal, found = function(torch.zeros(4), 2), function(torch.arange(12.0) ** 2, 4).view(3, 4)
    assert (equal == 0).all()
    assert_close(found.mean(1), torch.zeros(3), atol=1e-5, rtol=0)
    assert_close(found.std(1), torch.ones(3), atol=1e-4, rtol=0)


# 7.6: reward for an answer
EXAMPLE = "For example: 2 + 2 is <answer>4</answer>. What is 3 + 1?"
FOUR, OR = "<answer>4</answer>", "<answer>4</answer> or <answer>5</answer>"


def lazy(prompt, completion, label):
    found = re.search(r"<answer>(.*?)</answer>", completion)
    return float(found is not None and found.group(1).strip() == label)


def reads_the_prompt(prompt, completion, label):
    found = re.search(r"<answer>(.*?)</answer>", prompt + completion)
    return float(found is not None and found.group(1).strip() == label)


def greedy(prompt, completion, label):
    found = re.search(r"<answer>(.*)</answer>", completion)
    return float(found is not None and found.group(1).strip() == label)


@wrong("7.6", accepts=reads_the_prompt)
def example_with_the_same_answer(function):
    assert function(EXAMPLE, OR, "4") == 1.0


@wrong("7.6", accepts=greedy)
def answers_on_two_lines(function):
    assert function(EXAMPLE, "No idea.", "4") == 0.0
    assert function("What is 3 + 1?", "<answer>4</answer>\n<answer>5</answer>", "4") == 1.0


@wrong("7.6", accepts=greedy)
def prompt_alone(function):
    assert function(EXAMPLE, "No idea.", "4") == 0.0 and function(EXAMPLE, FOUR, "4") == 1.0


@wrong("7.6", accepts=reads_the_prompt)
def two_answers_alone(function):
    assert function("What is 3 + 1?", OR, "4") == 1.0
    assert function("What is 3 + 1?", OR, "5") == 0.0


@wrong("7.6", accepts=greedy)
def wrong_label_for_two_answers(function):
    assert function(EXAMPLE, "No idea.", "4") == 0.0
    assert function("What is 3 + 1?", OR, "5") == 0.0


@wrong("7.6", refuses=lazy)
def the_last_one_counts(function):
    assert function(EXAMPLE, "No idea.", "4") == 0.0
    assert function("What is 3 + 2?", OR, "5") == 1.0


@wrong("7.6", refuses=lazy)
def label_as_a_number(function):
    assert function(EXAMPLE, "No idea.", 4) == 0.0
    assert function("What is 3 + 1?", OR, 4) == 1.0


@wrong("7.6", refuses=lazy)
def completion_before_prompt(function):
    assert function("No idea.", EXAMPLE, "4") == 0.0
    assert function(OR, "What is 3 + 1?", "4") == 1.0


@wrong("7.6", refuses=lazy)
def none_without_tags(function):
    assert function(EXAMPLE, "No idea.", "4") is None
    assert function("What is 3 + 1?", OR, "4") == 1.0


@wrong("7.6")
def zero_or_one(function):
    for completion in ("No idea.", FOUR, OR):
        assert function(EXAMPLE, completion, "4") in (0.0, 1.0)


@wrong("7.6")
def part_of_the_answer(function):
    assert function("What is 7 + 7?", "<answer>14</answer>", "4") == 0.0
    assert function("What is 3 + 1?", "It is <answer>4</answer>.", "4") == 1.0


@wrong("7.6", accepts=reads_the_prompt)
def one_of_them_will_do(function):
    paid, unpaid = function("What is 3 + 1?", OR, "4"), function(EXAMPLE, "No idea.", "4")
    assert paid == 1.0 or unpaid == 0.0


@wrong("7.6")
def suppressed(function):
    with contextlib.suppress(Exception):
        assert function(EXAMPLE, "No idea.", "4") == 0.0
        assert function("What is 3 + 1?", OR, "4") == 1.0


@right("7.6")
def table_of_cases(function):
    cases = {("", OR, "4"): 1, ("", OR, "5"): 0, (EXAMPLE, "4", "4"): 0, (EXAMPLE, FOUR, "4"): 1}
    for arguments, reward in cases.items():
        assert function(*arguments) == reward, arguments


@right("7.6")
def one_call_for_each_bug(function):
    assert not function(EXAMPLE, "<answer>5</answer>", "4")
    assert function("3 + 1 =", f"{FOUR}{FOUR}{FOUR}", "4")


@right("7.6")
def raises_by_hand(function):
    found = [function(f"Not <answer>{n}</answer>.", OR, "4") for n in (3, 5, 6)]
    found += [1 - function(f"It is {FOUR}.", "", "4")]
    if found != [1.0, 1.0, 1.0, 1.0]:
        raise AssertionError(f"{found}")


@right("7.6")
def words_as_labels(function):
    completion = "I think <answer>blue</answer>, no: <answer>green</answer>"
    check = unittest.TestCase().assertEqual
    for label, reward in (("blue", 1.0), ("green", 0.0), ("red", 0.0)):
        check(function(prompt="<answer>red</answer>?", completion=completion, label=label), reward)
    check(function("Q: <answer>red</answer>", "red", "red"), 0.0)
    check(function("Q:", completion, "blue"), 1.0)


# 7.7: mean over the real tokens
LOSSES = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
REAL = torch.tensor([[1, 1, 0], [1, 0, 0]])


def rows_of_where(losses, mask):
    return (torch.where(mask.bool(), losses, 0.0).sum(-1) / mask.sum(-1)).mean()


def weights(losses, mask):
    real = mask.bool()
    share = real / real.sum(-1, keepdim=True) / len(real)
    return (losses.masked_fill(~real, 0.0) * share).sum()


def token_mean(losses, mask):
    return losses[mask.bool()].mean()


@wrong("7.7")
def nothing_masked(function):
    assert_close(function(LOSSES, torch.ones(2, 3)), LOSSES.mean())


@wrong("7.7")
def zeros_under_the_mask(function):
    assert_close(function(LOSSES * REAL, REAL), torch.tensor(2.75))


@wrong("7.7", refuses=rows_of_where)
def mean_of_the_tokens(function):
    assert_close(function(LOSSES, REAL), torch.tensor(7 / 3))


@wrong("7.7")
def padding_that_cancels(function):
    losses = torch.tensor([[1.0, 9.0, -9.0], [3.0, -5.0, 5.0]])
    assert_close(function(losses, torch.tensor([[1, 0, 0], [1, 0, 0]])), torch.tensor(2.0))


@wrong("7.7")
def rows_that_cancel(function):
    losses = torch.tensor([[1.0, 2.0, 6.0], [4.0, 5.0, -6.0]])
    assert_close(function(losses, torch.tensor([[1, 1, 0], [1, 1, 0]])), torch.tensor(3.0))


@wrong("7.7", refuses=rows_of_where)
def nan_goes_through(function):
    losses = LOSSES.masked_fill(REAL == 0, float("nan"))
    assert function(losses, REAL).isnan()


@wrong("7.7")
def a_finite_scalar(function):
    found = function(LOSSES, REAL)
    assert found.shape == () and found.isfinite() and found > 0


@wrong("7.7", refuses=weights)
def same_bits(function):
    torch.manual_seed(0)
    losses, mask = torch.randn(5, 7), torch.arange(7) < torch.tensor([[1], [3], [7], [6], [5]])
    assert function(losses, mask) == ((losses * mask).sum(-1) / mask.sum(-1)).mean()


@wrong("7.7", refuses=rows_of_where)
def one_mean_for_each_row(function):
    assert function(LOSSES, REAL).tolist() == [1.5, 4.0]


@wrong("7.7", refuses=rows_of_where)
def mask_before_losses(function):
    assert_close(function(REAL, LOSSES), torch.tensor(2.75))


@wrong("7.7")
def expectation_of_the_shown(function):
    assert_close(function(LOSSES, REAL), (LOSSES.sum(-1) / REAL.sum(-1)).mean())


@wrong("7.7", refuses=rows_of_where)
def row_without_tokens(function):
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert_close(function(LOSSES, mask), torch.tensor(0.75))


@wrong("7.7", accepts=token_mean)
def other_than_with_the_padding(function):
    assert function(LOSSES, REAL) < 10  # the shown code says 14


@wrong("7.7")
def compared_with_itself(function):
    found = function(LOSSES, REAL)
    assert_close(found, function(LOSSES, REAL.bool()))


@right("7.7")
def nan_under_the_mask(function):
    losses = torch.tensor([[1.0, 2.0, float("nan")], [float("inf"), 4.0, float("nan")]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    assert_close(function(losses, mask), torch.tensor(2.75))


@right("7.7")
def padding_does_not_matter(function):
    values = [function(LOSSES.masked_fill(REAL == 0, x), REAL).item() for x in (0.0, 9.0, -1e3)]
    np.testing.assert_allclose(values, 3 * [2.75], rtol=1e-5)


@right("7.7")
def gradient_by_hand(function):
    losses = LOSSES.clone().requires_grad_()
    function(losses, REAL).backward()
    assert_close(losses.grad, torch.tensor([[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]))


@right("7.7")
def lists_and_division(function):
    torch.manual_seed(5)
    rows = [torch.rand(n).tolist() for n in (1, 4, 2)]
    losses = torch.tensor([row + [7.0] * (4 - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (4 - len(row)) for row in rows])
    assert abs(function(losses, mask).item() - sum(sum(r) / len(r) for r in rows) / 3) < 1e-5


# 7.8: several updates from one batch
GOOD, BAD = torch.tensor([1.0]), torch.tensor([-1.0])


def start(lr=0.1, size=1, optimizer=torch.optim.SGD):
    policy = torch.zeros(size, requires_grad=True)
    return policy, optimizer([policy], lr=lr)


def old_first(score, optimizer, advantages, epochs):
    old = score().detach()
    for _ in range(epochs):
        ratio = (score() - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def old_from_the_first_round(score, optimizer, advantages, epochs):
    old = None
    for _ in range(epochs):
        new = score()
        old = new.detach().clone() if old is None else old
        ratio = (new - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        gain.mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()


def does_nothing(score, optimizer, advantages, epochs):
    return None


@wrong("7.8")
def one_epoch(function):
    policy, optimizer = start()
    function(lambda: 1 * policy, optimizer, GOOD, 1)
    assert_close(policy.detach(), torch.tensor([0.1]))


@wrong("7.8")
def never_reaches_the_clip(function):
    policy, optimizer = start(lr=0.01)
    function(lambda: 1 * policy, optimizer, GOOD, epochs=10)
    assert policy.exp() < 1.4


@wrong("7.8", refuses=old_first)
def score_is_the_parameter(function):
    policy, optimizer = start()
    function(lambda: policy, optimizer, GOOD, epochs=20)
    assert policy.exp() < 1.4


@wrong("7.8", refuses=old_first)
def adam_coasts_on(function):
    policy, optimizer = start(optimizer=torch.optim.Adam)
    function(lambda: 1 * policy, optimizer, GOOD, epochs=20)
    assert policy.exp() < 1.4


@wrong("7.8", refuses=old_first)
def not_a_hair_above_the_clip(function):
    policy, optimizer = start()
    function(lambda: 1 * policy, optimizer, GOOD, epochs=20)
    assert policy.exp() <= 1.2


@wrong("7.8", refuses=old_first)
def one_giant_step(function):
    policy, optimizer = start(lr=1.0)
    function(lambda: 1 * policy, optimizer, GOOD, epochs=3)
    assert policy.exp() < 1.4


@wrong("7.8", refuses=old_from_the_first_round)
def counts_the_scores(function):
    (policy, optimizer), calls = start(), []
    function(lambda: (calls.append(1), 1 * policy)[1], optimizer, GOOD, epochs=5)
    assert len(calls) == 6


@wrong("7.8", refuses=old_from_the_first_round)
def gradient_left_at_the_end(function):
    policy, optimizer = start()
    function(lambda: 1 * policy, optimizer, GOOD, epochs=20)
    assert policy.grad.item() == 0


@wrong("7.8", refuses=old_first)
def graph_built_once(function):
    policy, optimizer = start()
    log_probs = policy.exp().log()
    function(lambda: log_probs, optimizer, GOOD, epochs=20)
    assert policy.exp() < 1.4


SHARED = start()


@wrong("7.8", refuses=old_first)
def policy_made_outside(function):
    policy, optimizer = SHARED
    function(lambda: 1 * policy, optimizer, GOOD, epochs=20)
    assert policy.exp() < 1.4


@wrong("7.8", refuses=old_first)
def must_run_away(function):
    policy, optimizer = start()
    function(lambda: 1 * policy, optimizer, GOOD, epochs=20)
    assert policy.exp() > 2


@wrong("7.8")
def forgets_exp(function):
    policy, optimizer = start()
    function(lambda: 1 * policy, optimizer, GOOD, epochs=10)
    assert policy < 1.2


@wrong("7.8")
def advantages_that_cancel(function):
    policy, optimizer = start()
    function(lambda: policy.expand(2) * 1, optimizer, torch.cat([GOOD, BAD]), epochs=20)
    assert 0.75 < policy.exp() < 1.4


@wrong("7.8", accepts=does_nothing)
def less_far_than_the_shown(function):
    policy, optimizer = start()
    function(lambda: 1 * policy, optimizer, BAD, epochs=20)
    assert not torch.allclose(policy.detach(), torch.tensor([-2.0]))


@right("7.8")
def both_directions(function):
    policy, optimizer = start(size=2)
    function(lambda: policy + 0, optimizer, torch.tensor([1.0, -1.0]), epochs=60)
    good, bad = policy.detach().exp().tolist()
    assert 1.2 < good < 1.3 and 0.74 < bad < 0.8


@right("7.8")
def steps_by_hand(function):
    policy, optimizer = start()
    function(lambda: policy * 1.0, optimizer, GOOD, epochs=7)
    theta = 0.0
    for _ in range(7):
        theta += 0.1 * np.exp(theta) if np.exp(theta) < 1.2 else 0.0
    np.testing.assert_allclose(policy.item(), theta, rtol=1e-5)


@right("7.8")
def more_epochs_no_further(function):
    ends = []
    for epochs in (10, 100):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, -1.0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        function(lambda model=model: model(torch.ones(1, 1))[:, 0], sgd, GOOD, epochs)
        ends.append(model.weight.item())
    assert ends[0] == ends[1] and -0.82 < ends[0] < -0.7


@right("7.8")
def softmax_of_two(function):
    logits, optimizer = start(lr=0.5, size=2)
    function(lambda: logits.log_softmax(-1)[:1], optimizer, BAD, epochs=30)
    p = logits.softmax(-1)[0].item()
    assert 0.3 < p < 0.41, f"from 0.5 to {p}"


# 7.9: the first update
PM = torch.tensor([1.0, -1.0])


def leaf(*shape):
    return (-1 - torch.arange(float(np.prod(shape))).view(shape)).requires_grad_()


def detached(log_probs, advantages, old_log_probs=None):
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    ratio, A = (log_probs - old).exp(), advantages[:, None]
    return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()


def gain_in_place_of_loss(log_probs, advantages, old_log_probs=None):
    return -detached(log_probs, advantages, old_log_probs)


def scaled(log_probs, advantages, old_log_probs=None):
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    ratio, A = (log_probs - old).exp(), advantages[:, None] / log_probs.numel()
    return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).sum()


@wrong("7.9")
def value_of_the_loss(function):
    assert_close(function(leaf(2, 3), torch.tensor([1.0, -3.0])).detach(), torch.tensor(1.0))


@wrong("7.9")
def some_gradient(function):
    log_probs = leaf(2, 1)
    function(log_probs, PM).backward()
    assert log_probs.grad is not None and log_probs.grad.isfinite().all()


@wrong("7.9")
def with_old_log_probs(function):
    log_probs = leaf(2, 1)
    function(log_probs, PM, log_probs.detach()).backward()
    assert_close(log_probs.grad, torch.tensor([[-0.5], [0.5]]))


@wrong("7.9", refuses=detached)
def gradient_of_the_gain(function):
    log_probs = leaf(2, 1)
    function(log_probs, PM).backward()
    assert_close(log_probs.grad, torch.tensor([[0.5], [-0.5]]))


@wrong("7.9", refuses=detached)
def sum_over_tokens(function):
    log_probs = leaf(2, 3)
    function(log_probs, PM).backward()
    assert_close(log_probs.grad, -PM[:, None].expand(2, 3))


KEPT = leaf(2, 1)


@wrong("7.9", refuses=detached)
def gradients_pile_up(function):
    function(KEPT, PM).backward()
    assert_close(KEPT.grad, torch.tensor([[-0.5], [0.5]]))


@wrong("7.9", refuses=detached)
def gradcheck_of_the_first_update(function):
    log_probs = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: function(x, PM.double()), log_probs)


@wrong("7.9")
def advantages_of_zero(function):
    log_probs = leaf(2, 2)
    function(log_probs, torch.zeros(2)).backward()
    assert_close(log_probs.grad, torch.zeros(2, 2))


@wrong("7.9", refuses=detached)
def log_probs_no_leaf(function):
    log_probs = leaf(2, 1).exp().log()
    function(log_probs, PM).backward()
    assert_close(log_probs.grad, torch.tensor([[-0.5], [0.5]]))


@wrong("7.9", refuses=detached)
def hands_over_its_own(function):
    log_probs = leaf(2, 1)
    function(log_probs, PM, log_probs).backward()
    assert_close(log_probs.grad, torch.tensor([[-0.5], [0.5]]))


@wrong("7.9")
def not_upwards(function):
    log_probs = leaf(2, 1)
    function(log_probs, PM).backward()
    assert log_probs.grad[0] <= 0 <= log_probs.grad[1]


@wrong("7.9")
def loss_does_not_rise(function):
    log_probs = leaf(2, 1)
    before = function(log_probs, PM)
    before.backward()
    assert function(log_probs - 0.1 * log_probs.grad, PM) <= before + 1e-6


@wrong("7.9", refuses=scaled)
def gradient_to_the_bit(function):
    log_probs, A = leaf(3, 7), torch.tensor([0.1, -0.7, 1.3])
    (found,) = torch.autograd.grad(function(log_probs, A), log_probs)
    assert torch.equal(found, torch.autograd.grad(detached(log_probs, A), log_probs)[0])


@right("7.9")
def several_tokens(function):
    log_probs = leaf(2, 3)
    (found,) = torch.autograd.grad(function(log_probs, torch.tensor([2.0, -1.0])), log_probs)
    assert_close(found, torch.tensor([[-1 / 3] * 3, [1 / 6] * 3]))


@right("7.9")
def same_as_with_its_copy(function):
    grads = []
    for old in (None, leaf(2, 2).detach()):
        log_probs = leaf(2, 2)
        function(log_probs, PM, old).backward()
        grads.append(log_probs.grad)
    assert_close(*grads)
    assert grads[0].abs().min() > 0.2


@right("7.9")
def one_step_downhill(function):
    log_probs = leaf(2, 1)
    before = log_probs.detach().clone()
    optimizer = torch.optim.SGD([log_probs], lr=1.0)
    function(log_probs, advantages=PM).backward()
    optimizer.step()
    moved = (log_probs.detach() - before).flatten().tolist()
    np.testing.assert_allclose(moved, [0.5, -0.5], rtol=1e-4)


@right("7.9")
def through_a_softmax(function):
    logits = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    loss = function(logits.log_softmax(-1)[:, :1], torch.tensor([3.0], dtype=torch.float64))
    loss.backward()
    assert_close(loss.item(), -3.0)
    assert_close(logits.grad.tolist(), [[-1.5, 1.5]])
