"""Answers to the exercises of notebook 03."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong

nan, inf = float("nan"), float("inf")


def f64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


IDS = torch.tensor([[4, 1, 4, 2, 7], [4, 4, 4, 4, 4], [1, 2, 3, 4, 14]])
HOLES = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1]])
ENDS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])


@wrong("3.1", IDS, HOLES, 4)
def ids_times_mask_over_width(completions, mask, letter_id):
    return ((completions == letter_id) * mask).float().mean(dim=-1)


@wrong("3.1", torch.tensor([[0, 1, 2]]), torch.tensor([[1, 1, 0]]), 0)
def padding_becomes_zero(completions, mask, letter_id):
    real = mask.bool()
    return (completions.masked_fill(~real, 0) == letter_id).sum(dim=-1) / real.sum(dim=-1)


@wrong("3.1", IDS, HOLES, 4)
def mask_as_lengths(completions, mask, letter_id):
    lengths = mask.sum(dim=-1).long().tolist()
    return torch.stack([(r[:n] == letter_id).double().mean() for r, n in zip(completions, lengths)])


@wrong("3.1", IDS, HOLES, 4)
def up_to_the_last_real(completions, mask, letter_id):
    places = torch.arange(1, mask.shape[1] + 1)
    real = places <= (mask * places).amax(dim=-1, keepdim=True)
    return ((completions == letter_id) & real).sum(dim=-1) / real.sum(dim=-1)


@wrong("3.1", IDS, HOLES, 4)
def leading_run(completions, mask, letter_id):
    real = mask.long().cumprod(dim=-1)
    return ((completions == letter_id) * real).sum(dim=-1) / real.sum(dim=-1).clamp(min=1)


@wrong("3.1", IDS, HOLES.double(), 4)
def ands_a_float_mask(completions, mask, letter_id):
    return ((completions == letter_id) & mask).sum(dim=-1) / mask.sum(dim=-1)


@wrong("3.1", IDS, HOLES.bool(), 4)
def one_minus_a_bool(completions, mask, letter_id):
    hits = (completions == letter_id).masked_fill((1 - mask).bool(), False)
    return hits.sum(dim=-1) / mask.sum(dim=-1)


@wrong("3.1", IDS, ENDS, 9)
def bincount_rows_short(completions, mask, letter_id):
    rows = ((completions == letter_id) & mask.bool()).nonzero()[:, 0]
    return torch.bincount(rows) / mask.sum(dim=-1)


@wrong("3.1", IDS, ENDS, 20)
def one_hot_too_narrow(completions, mask, letter_id):
    hits = F.one_hot(completions)[..., letter_id]
    return (hits * mask).sum(dim=-1) / mask.sum(dim=-1)


@wrong("3.1", IDS, torch.ones_like(IDS), 4)
def counted_in_text(completions, mask, letter_id):
    rows = [r[m.bool()].tolist() for r, m in zip(completions, mask)]
    return torch.tensor([" ".join(map(str, r)).count(str(letter_id)) / len(r) for r in rows])


@wrong("3.1", IDS, ENDS, 4)
def padding_is_the_last_id(completions, mask, letter_id):
    real = completions != completions[:, -1:]
    return ((completions == letter_id) & real).sum(dim=-1) / real.sum(dim=-1).clamp(min=1)


@wrong("3.1", IDS[:1], HOLES[:1], 4)
def squeezes_one_row(completions, mask, letter_id):
    shares = (completions == letter_id).double().unsqueeze(1) @ mask.double().unsqueeze(2)
    return shares.squeeze() / mask.sum(dim=-1).squeeze()


@wrong("3.1", torch.tensor([[260, 4, 1]]), torch.tensor([[1, 1, 1]]), 4)
def bytes_of_ids(completions, mask, letter_id):
    hits = completions.to(torch.uint8).eq(letter_id).logical_and(mask)
    return hits.sum(dim=-1) / mask.sum(dim=-1)


@wrong("3.1", IDS, ENDS, 4)
def eps_below(completions, mask, letter_id):
    return ((completions == letter_id) * mask).sum(dim=-1) / (mask.sum(dim=-1) + 1e-4)


@right("3.1")
def means_of_picked(completions, mask, letter_id):
    picked = [row[keep] for row, keep in zip(completions, mask > 0)]
    return torch.stack([row.eq(letter_id).double().mean() for row in picked])


@right("3.1")
def sentinel_einsum(completions, mask, letter_id):
    m = mask.double()
    return torch.einsum("nt,nt->n", completions.eq(letter_id).double(), m) / m.sum(1)


@right("3.1")
def nanmean_of_hits(completions, mask, letter_id):
    hits = torch.where(completions == letter_id, 1.0, 0.0)
    return hits.masked_fill(mask == 0, nan).nanmean(dim=1)


@right("3.1")
def numpy_average(completions, mask, letter_id):
    hits = np.asarray(completions) == letter_id
    return torch.from_numpy(np.average(hits, axis=1, weights=np.asarray(mask).astype(float)))


SIX = f64(1.0, 0.0, 0.5, -2.0, -1.0, 4.0)  # two groups of three, or three of two
HAIR = f64(0.5, 0.500001, 0.5, 0.25, 0.25, 0.25)


@wrong("3.2", SIX, 3)
def of_the_batch(rewards, group_size):
    same = rewards.max() == rewards.min()
    return torch.where(same, 0.0, (rewards - rewards.mean()) / (rewards.std() + 1e-4))


@wrong("3.2", SIX, 3)
def biased_std(rewards, group_size):
    g = rewards.view(-1, group_size)
    a = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True, unbiased=False) + 1e-4)
    return a.masked_fill((g == g[:, :1]).all(1, keepdim=True), 0.0).flatten()


@wrong("3.2", SIX, 3)
def chunks_not_split(rewards, group_size):
    def one(g):
        return (g - g.mean()) / (g.std() + 1e-4) if g.min() < g.max() else torch.zeros_like(g)

    return torch.cat([one(g) for g in rewards.chunk(group_size)])


@wrong("3.2", SIX, 3)
def repeats_the_means(rewards, group_size):
    g = rewards.view(-1, group_size)
    mean, std = (x.repeat(group_size) for x in (g.mean(1), g.std(1)))
    same = (g.amax(1) == g.amin(1)).repeat(group_size)
    return torch.where(same, 0.0, (rewards - mean) / (std + 1e-4))


@wrong("3.2", HAIR, 3)
def isclose_is_equal(rewards, group_size):
    g = rewards.view(-1, group_size)
    same = torch.isclose(g.amax(1, keepdim=True), g.amin(1, keepdim=True))
    a = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)
    return torch.where(same, 0.0, a).flatten()


@wrong("3.2", HAIR, 3)
def small_std_is_none(rewards, group_size):
    g = rewards.view(-1, group_size)
    std = g.std(1, keepdim=True)
    return torch.where(std < 1e-6, 0.0, (g - g.mean(1, keepdim=True)) / (std + 1e-4)).flatten()


@wrong("3.2", HAIR, 3)
def std_clamped(rewards, group_size):
    g = rewards.view(-1, group_size)
    a = (g - g.mean(1, keepdim=True)) / g.std(1, keepdim=True).clamp(min=1e-4)
    return torch.where(g.amax(1, keepdim=True) == g.amin(1, keepdim=True), 0.0, a).flatten()


@wrong("3.2", HAIR, 3)
def eps_under_the_root(rewards, group_size):
    g = rewards.view(-1, group_size)
    d = g - g.mean(1, keepdim=True)
    a = d / (d.square().sum(1, keepdim=True) / (group_size - 1) + 1e-8).sqrt()
    return torch.where((g == g[:, :1]).all(1, keepdim=True), 0.0, a).flatten()


@wrong("3.2", f64(1.0, 0.0, 1.0, 0.5, 0.25, 0.0), 3)
def first_equals_last(rewards, group_size):
    g = rewards.view(-1, group_size)
    a = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)
    return torch.where(g[:, :1] == g[:, -1:], 0.0, a).flatten()


@wrong("3.2", SIX, 3)
def zero_where_like_the_first(rewards, group_size):
    g = rewards.view(-1, group_size)
    a = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)
    return torch.where(g == g[:, :1], 0.0, a).flatten()


@wrong("3.2", f64(1.0, 1.0, 0.0, 1.0, 0.0, 0.5, 0.25, 1.0), 4)
def median_is_the_top(rewards, group_size):
    g = rewards.view(-1, group_size)
    a = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)
    return a.masked_fill(g.sort(1).values[:, 1:2] == g.amax(1, keepdim=True), 0.0).flatten()


@wrong("3.2", f64(1.0, -1.0, 0.0, 1.0, 2.0, 3.0), 3)
def sum_of_zero(rewards, group_size):
    g = rewards.view(-1, group_size)
    a = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)
    dull = (g.sum(1) == 0) | (g.amax(1) == g.amin(1))
    return a.masked_fill(dull[:, None], 0.0).flatten()


@wrong("3.2", f64(10.0, 10.000001, 10.0, 1.0, 2.0, 3.0), 3)
def floats_inside(rewards, group_size):
    g = rewards.float().view(-1, group_size)
    a = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)
    return a.masked_fill(g.amax(1, keepdim=True) == g.amin(1, keepdim=True), 0.0).view(-1)


@wrong("3.2", f64(*[-1e9 / 7] * 7), 7)
def std_of_zero_only(rewards, group_size):
    g = rewards.view(-1, group_size)
    std = g.std(1, keepdim=True)
    return torch.where(std == 0, 0.0, (g - g.mean(1, keepdim=True)) / (std + 1e-4)).flatten()


@right("3.2")
def split_and_join(rewards, group_size):
    out = []
    for g in rewards.split(group_size):
        flat = len(set(g.tolist())) == 1
        out.append(torch.zeros_like(g) if flat else (g - g.mean()) / (g.std() + 1e-4))
    return torch.cat(out)


@right("3.2")
def shifted_by_the_first(rewards, group_size):
    g = rewards.unfold(0, group_size, group_size)
    g = g - g[:, :1]  # of equal rewards all are 0 from here on
    variance, mean = torch.var_mean(g, dim=1, keepdim=True)
    return ((g - mean) / (variance.sqrt() + 1e-4)).reshape(-1)


@right("3.2")
def numpy_groups(rewards, group_size):
    g = np.array(rewards.tolist()).reshape(-1, group_size)
    a = (g - g.mean(1, keepdims=True)) / (g.std(1, ddof=1, keepdims=True) + 1e-4)
    a[np.ptp(g, axis=1) == 0] = 0
    return torch.tensor(a.ravel(), dtype=rewards.dtype)


@right("3.2")
def in_columns(rewards, group_size):
    columns = rewards.reshape(-1, group_size).T
    differ = (columns != columns[0]).any(dim=0)
    centred = columns - columns.mean(dim=0)
    std = (centred.pow(2).sum(dim=0) / (group_size - 1)).sqrt()
    return (differ * centred / (std + 1e-4)).T.flatten()


RATIOS = f64(1.5, 0.5, 1.5, 0.5, 1.1, 0.95, 0.0, 30.0)
SIGNS = f64(1.0, 1.0, -1.0, -1.0, 2.0, -0.5, -1.0, -2.0)


@wrong("3.3", RATIOS, SIGNS, 0.2, 0.3)
def clamp_alone(ratio, advantages, low, high):
    return ratio.clamp(1 - low, 1 + high) * advantages


@wrong("3.3", RATIOS, SIGNS, 0.2, 0.3)
def minimum_before_the_sign(ratio, advantages, low, high):
    return torch.minimum(ratio, ratio.clamp(1 - low, 1 + high)) * advantages


@wrong("3.3", RATIOS, SIGNS, 0.1, 0.3)
def bounds_swapped(ratio, advantages, low, high):
    return torch.minimum(ratio * advantages, ratio.clamp(1 - high, 1 + low) * advantages)


@wrong("3.3", RATIOS, SIGNS, 0.2, 0.3)
def half_a_gradient(ratio, advantages, low, high):
    clipped = ratio.detach().clamp(1 - low, 1 + high)
    return torch.minimum(ratio * advantages, clipped * advantages)


@wrong("3.3", RATIOS, SIGNS, 0.2, 0.3)
def no_gradient_at_a_tie(ratio, advantages, low, high):
    free, held = ratio * advantages, ratio.detach().clamp(1 - low, 1 + high) * advantages
    return torch.where(free < held, free, held)


@wrong("3.3", RATIOS, SIGNS, 0.2, 0.3)
def straight_through(ratio, advantages, low, high):
    clipped = ratio + (ratio.clamp(1 - low, 1 + high) - ratio).detach()
    return torch.minimum(ratio * advantages, clipped * advantages)


@wrong("3.3", RATIOS, SIGNS, 0.2, 0.3)
def dual_clip(ratio, advantages, low, high):
    j = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return torch.where(advantages < 0, torch.maximum(j, 10 * advantages), j)


@wrong("3.3", f64(0.4, 1.3), f64(-1.0, 1.0), 0.5, 0.0)
def zero_is_falsy(ratio, advantages, low, high):
    clipped = ratio.clamp(1 - low, 1 + (high or low))
    return torch.minimum(ratio * advantages, clipped * advantages)


@wrong("3.3", f64(0.0, 1.3), f64(-1.0, 1.0), 1.5, 0.2)
def a_floor_above_zero(ratio, advantages, low, high):
    clipped = ratio.clamp(max(1 - low, 1e-8), 1 + high)
    return torch.minimum(ratio * advantages, clipped * advantages)


@wrong("3.3", f64(0.5, 1.0), f64(-1.0, 1.0), 1.5, 0.2)
def in_log_space(ratio, advantages, low, high):
    log = ratio.log().clamp(math.log(1 - low), math.log(1 + high))
    return torch.minimum(ratio * advantages, log.exp() * advantages)


@wrong("3.3", f64(1e20, 0.5), f64(1.0, 1.0), 0.2, 0.2)
def excess_subtracted(ratio, advantages, low, high):
    over = (ratio - 1 - high).relu() * advantages.relu()
    under = (1 - low - ratio).relu() * (-advantages).relu()
    return ratio * advantages - over - under


@wrong("3.3", RATIOS, SIGNS, 0.2, 0.3)
def one_sign_for_all(ratio, advantages, low, high):
    if advantages.mean() > 0:
        return ratio.clamp(max=1 + high) * advantages
    return ratio.clamp(min=1 - low) * advantages


@wrong("3.3", f64(0.6, 0.9, 1.5), f64(-1.0, -1.0, 1.0), 0.5, 0.25)
def lower_is_the_inverse(ratio, advantages, low, high):
    clipped = ratio.clamp(1 / (1 + low), 1 + high)
    return torch.minimum(ratio * advantages, clipped * advantages)


@wrong("3.3", f64(0.7, 5.0, 2.5), f64(-1.0, 1.0, 1.0), 0.2, 2.0)
def high_at_most_one(ratio, advantages, low, high):
    low, high = min(low, 1.0), min(high, 1.0)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


@right("3.3")
def by_the_sign(ratio, advantages, low, high):
    capped, floored = ratio.clamp(max=1 + high), ratio.clamp(min=1 - low)
    return torch.where(advantages >= 0, capped, floored) * advantages


@right("3.3")
def enough_is_enough(ratio, advantages, low, high):
    praised = (advantages > 0) & (ratio > 1 + high)
    blamed = (advantages < 0) & (ratio < 1 - low)
    rho = ratio.masked_fill(praised, 1 + high).masked_fill(blamed, 1 - low)
    return rho * advantages


@right("3.3")
def row_by_row(ratio, advantages, low, high):
    def one(r, a):
        return min(r * a, torch.clamp(r, 1 - low, 1 + high) * a)

    return torch.stack([one(r, a) for r, a in zip(ratio, advantages)])


@right("3.3")
def minus_the_worse_loss(ratio, advantages, low, high):
    losses = torch.stack([-advantages * ratio, -advantages * torch.clip(ratio, 1 - low, 1 + high)])
    return losses.max(dim=0).values.neg()


P = f64([-1.0, -2.0, nan, -0.5], [-3.0, -0.1, -2.0, -1.0], [inf, 0.0, -inf, 5.0])
Q = f64([-1.5, nan, -1.0, -0.25], [-1.0, -0.2, -2.5, 900.0], [-inf, inf, -inf, nan])
REAL = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
FAR = f64([0.0, -400.0, -0.5]), f64([-300.0, -401.0, -0.4]), torch.tensor([[1, 1, 0]])
NEAR = f64([-0.500, -1.0, -2.0]), f64([-0.508, -1.5, -2.0]), torch.tensor([[1, 1, 1]])
CLEAN = f64([-1.0, -2.0, -0.3], [-3.0, -0.1, -2.0]), f64([-1.5, -1.0, -0.6], [-1.0, -0.2, -2.5])
PART = torch.tensor([[1, 0, 1], [0, 0, 0]])


@wrong("3.4", P, Q, REAL)
def where_at_the_end(log_probs, ref_log_probs, mask):
    x = ref_log_probs - log_probs
    return torch.where(mask.bool(), x.exp() - x - 1, 0.0)


@wrong("3.4", P, Q, REAL)
def nan_to_num_at_the_end(log_probs, ref_log_probs, mask):
    x = ref_log_probs - log_probs
    return torch.nan_to_num(x.exp() - x - 1) * mask


@wrong("3.4", *CLEAN, PART)
def policy_over_reference(log_probs, ref_log_probs, mask):
    x = (log_probs - ref_log_probs).masked_fill(mask == 0, 0.0)
    return x.exp() - x - 1


@wrong("3.4", *FAR)
def clamped_like_a_library(log_probs, ref_log_probs, mask):
    x = (ref_log_probs - log_probs).masked_fill(mask == 0, 0.0).clamp(-20, 20)
    return x.exp() - x - 1


@wrong("3.4", f64([-800.0, -1.0]), f64([-800.5, -2.0]), torch.tensor([[1, 1]]))
def of_probabilities(log_probs, ref_log_probs, mask):
    p, q = (x.masked_fill(~mask.bool(), 0.0).exp() for x in (log_probs, ref_log_probs))
    return q / p - (q / p).log() - 1


@wrong("3.4", *CLEAN, PART)
def pathwise_lost(log_probs, ref_log_probs, mask):
    x = torch.where(mask.bool(), ref_log_probs - log_probs, 0.0)
    return x.detach().exp() - x - 1


@wrong("3.4", *CLEAN, PART)
def an_empty_row_empties_all(log_probs, ref_log_probs, mask):
    if (mask.sum(dim=-1) == 0).any():
        return torch.zeros_like(log_probs)
    x = torch.where(mask.bool(), ref_log_probs - log_probs, 0.0)
    return x.exp() - x - 1


@wrong("3.4", *FAR)
def zero_is_padding(log_probs, ref_log_probs, mask):
    real = mask.bool() & (log_probs != 0)
    x = torch.where(real, ref_log_probs - log_probs, 0.0)
    return torch.expm1(x) - x


@wrong("3.4", *FAR)
def minus_100_is_padding(log_probs, ref_log_probs, mask):
    x = (ref_log_probs - log_probs).where(mask.bool() & (ref_log_probs > -100), 0.0)
    return torch.expm1(x) - x


@wrong("3.4", *NEAR)
def square_when_small(log_probs, ref_log_probs, mask):
    x = torch.where(mask.bool(), ref_log_probs - log_probs, 0.0)
    return torch.where(x.abs() < 1e-2, x.square() / 2, x.exp() - x - 1)


@wrong("3.4", f64([-1000.03, -1.0]), f64([-1000.71, -2.0]), torch.tensor([[1, 1]]))
def in_float32(log_probs, ref_log_probs, mask):
    x = (ref_log_probs.float() - log_probs.float()).masked_fill(mask == 0, 0.0)
    return (x.exp() - x - 1).to(log_probs.dtype)


@wrong("3.4", P, Q, REAL)
def the_policy_alone_masked(log_probs, ref_log_probs, mask):
    x = ref_log_probs - log_probs.masked_fill(mask == 0, 0.0)
    return (x.exp() - x - 1) * mask


@wrong("3.4", P, Q, REAL)
def finite_is_real(log_probs, ref_log_probs, mask):
    x = ref_log_probs - log_probs
    x = torch.where(x.isfinite(), x, 0.0)
    return (x.exp() - x - 1) * mask


@wrong("3.4", *CLEAN, torch.tensor([[0, 1, 1], [1, 0, 1]]))
def mask_taken_for_ends(log_probs, ref_log_probs, mask):
    real = torch.arange(mask.shape[1]) < mask.sum(dim=1, keepdim=True)
    x = (ref_log_probs - log_probs).masked_fill(~real, 0.0)
    return x.exp() - x - 1


@right("3.4")
def policy_filled_and_where_at_the_end(log_probs, ref_log_probs, mask):
    x = ref_log_probs - log_probs.masked_fill(mask == 0, 0.0)
    return (x.exp() - x - 1).masked_fill(mask == 0, 0.0)


@right("3.4")
def scattered(log_probs, ref_log_probs, mask):
    real = mask.bool()
    x = ref_log_probs[real] - log_probs[real]
    return torch.zeros_like(log_probs).masked_scatter(real, x.expm1() - x)


@right("3.4")
def both_filled(log_probs, ref_log_probs, mask):
    p, q = (t.masked_fill(mask == 0, -1.0) for t in (log_probs, ref_log_probs))
    return torch.relu((q - p).exp() - (q - p) - 1)


@right("3.4")
def cell_by_cell(log_probs, ref_log_probs, mask):
    def k3(p, q, m):
        return torch.exp(q - p) + p - q - 1 if m else torch.zeros_like(q)

    rows = zip(log_probs, ref_log_probs, mask)
    return torch.stack([torch.stack([k3(*cell) for cell in zip(*row)]) for row in rows])


@right("3.4")
def index_put(log_probs, ref_log_probs, mask):
    at = mask.nonzero(as_tuple=True)
    x = ref_log_probs[at].detach() - log_probs[at]
    out = log_probs.new_zeros(log_probs.shape)
    return out.index_put(at, x.exp().sub(x).sub(1))


NEW = f64([-1.0, -2.0, nan], [-0.5, inf, -3.0], [-0.2, -0.1, 7.0])
OLD = f64([-1.2, -2.1, -1.0], [-0.4, nan, -3.1], [-0.9, -0.2, -inf])
GAINS = f64(1.0, -1.0, 0.0)
KEEP = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 0]])
TIDY = f64([-1.0, -2.0, -0.5], [-0.5, -1.0, -3.0]), f64([-1.2, -2.1, -0.1], [-0.4, -1.5, -3.1])
BOTH = f64(1.0, -2.0)
FULL = torch.ones(2, 3)


def surrogate(log_ratio, advantages, clip):
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


@wrong("3.5", NEW, OLD, GAINS, KEEP, 0.2)
def mask_multiplied(log_probs, old_log_probs, advantages, mask, clip):
    return -surrogate(((log_probs - old_log_probs) * mask).sum(-1), advantages, clip).mean()


@wrong("3.5", NEW, OLD, GAINS, KEEP, 0.2)
def geometric(log_probs, old_log_probs, advantages, mask, clip):
    x = torch.where(mask.bool(), log_probs - old_log_probs, 0.0)
    return -surrogate(x.sum(-1) / mask.sum(-1), advantages, clip).mean()


@wrong("3.5", NEW, OLD, GAINS, KEEP, 0.2)
def silent_rows_left_out(log_probs, old_log_probs, advantages, mask, clip):
    x = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(-1)
    return -surrogate(x, advantages, clip)[advantages != 0].mean()


@wrong("3.5", *TIDY, BOTH, FULL, 0.2)
def advantages_as_a_column(log_probs, old_log_probs, advantages, mask, clip):
    x = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(-1)
    return -surrogate(x, advantages[:, None], clip).mean()


@wrong("3.5", f64([-800.0, -0.1]), f64([-0.1, -800.0]), f64(1.0), torch.ones(1, 2), 0.2)
def product_of_ratios(log_probs, old_log_probs, advantages, mask, clip):
    ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).exp().prod(dim=-1)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


@wrong("3.5", f64([-500.0, -500.0]), f64([-500.0, -500.1]), f64(1.0), torch.ones(1, 2), 0.2)
def probability_over_probability(log_probs, old_log_probs, advantages, mask, clip):
    new, old = (
        x.masked_fill(mask == 0, 0.0).sum(-1).exp() for x in (log_probs, old_log_probs.detach())
    )
    clipped = (new / old).clamp(1 - clip, 1 + clip)
    return -torch.minimum(new / old * advantages, clipped * advantages).mean()


@wrong("3.5", *TIDY, -BOTH, FULL, 0.0)
def clip_or_default(log_probs, old_log_probs, advantages, mask, clip=None):
    x = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(-1)
    return -surrogate(x, advantages, clip or 0.2).mean()


@wrong("3.5", *TIDY, BOTH, FULL, 0.2)
def advantages_centred_again(log_probs, old_log_probs, advantages, mask, clip):
    x = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(-1)
    return -surrogate(x, advantages - advantages.mean(), clip).mean()


@wrong("3.5", f64([-1.0, -13.0]), f64([-13.0, -1.1]), f64(1.0), torch.ones(1, 2), 0.2)
def tokens_held_to_ten(log_probs, old_log_probs, advantages, mask, clip):
    x = (log_probs - old_log_probs).masked_fill(mask == 0, 0.0).clamp(-10, 10)
    return -surrogate(x.sum(-1), advantages, clip).mean()


@wrong("3.5", f64([-1.0, -1.0]), f64([-3.0, -1.0]), f64(-1.0), torch.ones(1, 2), 0.2)
def at_most_three(log_probs, old_log_probs, advantages, mask, clip):
    x = (log_probs - old_log_probs).masked_fill(mask == 0, 0.0).sum(-1)
    j = surrogate(x, advantages, clip)
    return -torch.where(advantages < 0, torch.maximum(j, 3 * advantages), j).mean()


@wrong("3.5", *(x[:, :2] for x in TIDY), BOTH, FULL[:, :2], 1.5)
def bounds_in_log_space(log_probs, old_log_probs, advantages, mask, clip):
    x = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(-1)
    held = x.clamp(math.log(1 - clip), math.log(1 + clip))
    return -torch.minimum(x.exp() * advantages, held.exp() * advantages).mean()


@wrong("3.5", NEW[:, :2], OLD[:, :2] * 0 + 9, GAINS, torch.tensor([[1, 0], [1, 0], [1, 1]]), 0.2)
def garbage_is_not_finite(log_probs, old_log_probs, advantages, mask, clip):
    x = log_probs - old_log_probs
    return -surrogate(x.where(x.isfinite(), 0.0).sum(-1), advantages, clip).mean()


@wrong("3.5", *(x[:, :2] for x in TIDY), BOTH, torch.tensor([[0, 1], [1, 1]]), 0.2)
def cut_at_the_lengths(log_probs, old_log_probs, advantages, mask, clip):
    lengths = mask.sum(-1).long().tolist()
    x = [(p[:n] - q[:n]).sum() for p, q, n in zip(log_probs, old_log_probs, lengths)]
    return -surrogate(torch.stack(x), advantages, clip).mean()


@wrong("3.5", *(x[:1, :2] for x in TIDY), BOTH[:1], FULL[:1, :2], 0.5)
def held_copy_detached(log_probs, old_log_probs, advantages, mask, clip):
    x = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(-1)
    clipped = x.exp().detach().clamp(1 - clip, 1 + clip)
    return torch.maximum(-x.exp() * advantages, -clipped * advantages).mean()


@right("3.5")
def rows_in_a_loop(log_probs, old_log_probs, advantages, mask, clip):
    total = 0.0
    for p, q, a, m in zip(log_probs, old_log_probs, advantages, mask.bool()):
        rho = (p[m] - q[m]).sum().exp()
        total = total - torch.min(rho * a, rho.clamp(1 - clip, 1 + clip) * a)
    return total / len(advantages)


@right("3.5")
def totals_first(log_probs, old_log_probs, advantages, mask, clip):
    pad = mask == 0
    new, old = (x.masked_fill(pad, 0).sum(dim=1) for x in (log_probs, old_log_probs))
    rho = (new - old).exp()
    held = torch.where(advantages > 0, rho.clamp(max=1 + clip), rho.clamp(min=1 - clip))
    return -(held * advantages).mean()


@right("3.5")
def summed_by_row_numbers(log_probs, old_log_probs, advantages, mask, clip):
    rows, places = mask.nonzero(as_tuple=True)
    x = log_probs[rows, places] - old_log_probs[rows, places]
    x = torch.zeros_like(advantages).index_add(0, rows, x)
    return surrogate(x, advantages, clip).sum() / -advantages.numel()


@right("3.5")
def worse_of_two_losses(log_probs, old_log_probs, advantages, mask, clip):
    x = functools.reduce(torch.add, (log_probs - old_log_probs).where(mask > 0, 0.0).unbind(1))
    losses = -advantages * torch.stack([x.exp(), x.exp().clip(1 - clip, 1 + clip)])
    return losses.amax(dim=0).mean()


LOGITS = f64(0.5, 0.0, -1.0, 0.3, 2.0)
DRAWN = torch.tensor([0, 1, 3, 0])
PAID = f64(1.0, 0.0, -0.5, 0.25)


def scores(rewards):
    if (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def repeats_lost(logits, tokens, rewards, lr):
    push = torch.zeros_like(logits)
    push[tokens] += scores(rewards) / len(tokens)
    return logits + lr * push


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def shared_parameter(logits, tokens, rewards, lr):
    policy = torch.nn.Parameter(logits)
    (-(scores(rewards) * F.log_softmax(policy, dim=0)[tokens]).mean()).backward()
    torch.optim.SGD([policy], lr=lr).step()
    return policy.detach()


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def logits_want_a_gradient(logits, tokens, rewards, lr):
    logits.requires_grad_()
    j = (scores(rewards) * logits.log_softmax(0)[tokens]).mean()
    return (logits + lr * torch.autograd.grad(j, logits)[0]).detach()


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def the_graph_stays(logits, tokens, rewards, lr):
    policy = logits.clone().requires_grad_()
    j = (scores(rewards) * policy.log_softmax(0)[tokens]).mean()
    return policy + lr * torch.autograd.grad(j, policy)[0]


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def bincount_of_the_drawn(logits, tokens, rewards, lr):
    return logits + lr * torch.bincount(tokens, weights=scores(rewards)) / len(tokens)


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def over_the_words(logits, tokens, rewards, lr):
    hot = F.one_hot(tokens, len(logits)).to(logits.dtype)
    return logits + lr * (scores(rewards) @ (hot - logits.softmax(0))) / len(logits)


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def mean_of_each_word(logits, tokens, rewards, lr):
    a, words = scores(rewards), tokens.unique()
    push = torch.zeros_like(logits)
    push[words] = torch.stack([a[tokens == word].mean() for word in words])
    return logits + lr * push / len(words)


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def normalised_too(logits, tokens, rewards, lr):
    policy = logits.log_softmax(dim=0).requires_grad_()
    (grad,) = torch.autograd.grad((scores(rewards) * policy[tokens]).mean(), policy)
    return policy.detach() + lr * grad


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def of_probabilities_not_logs(logits, tokens, rewards, lr):
    policy = logits.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad((scores(rewards) * policy.softmax(0)[tokens]).mean(), policy)
    return logits + lr * grad


@wrong("3.6", f64(0.0, 0.5, -1000.0), torch.tensor([0, 1, 0]), f64(1.0, 0.0, 0.5), 0.5)
def log_of_all_probabilities(logits, tokens, rewards, lr):
    policy = logits.detach().clone().requires_grad_()
    log_p = policy.softmax(dim=0).log()
    (grad,) = torch.autograd.grad((scores(rewards) * log_p[tokens]).mean(), policy)
    return logits + lr * grad


@wrong("3.6", LOGITS, DRAWN, PAID - 2, 0.5)
def nothing_won_nothing_done(logits, tokens, rewards, lr):
    if rewards.max() <= 0:
        return logits.clone()
    push = torch.zeros_like(logits).index_add(0, tokens, scores(rewards))
    return logits + lr * push / len(tokens)


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def std_with_all(logits, tokens, rewards, lr):
    a = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    return logits + lr * torch.zeros_like(logits).scatter_add(0, tokens, a) / len(tokens)


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def adam_step(logits, tokens, rewards, lr):
    policy = logits.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([policy], lr=lr)
    (-(scores(rewards) * policy.log_softmax(0)[tokens]).mean()).backward()
    optimizer.step()
    return policy.detach()


@wrong("3.6", LOGITS, DRAWN, PAID, 0.5)
def as_wide_as_the_group(logits, tokens, rewards, lr):
    push = torch.zeros_like(rewards).index_add(0, tokens, scores(rewards))
    return logits + lr * push / len(rewards)


@right("3.6")
def without_autograd(logits, tokens, rewards, lr):
    push = torch.zeros_like(logits).index_add(0, tokens, scores(rewards).to(logits.dtype))
    return logits + lr * push / tokens.numel()


@right("3.6")
def sgd_on_a_copy(logits, tokens, rewards, lr):
    policy = torch.nn.Parameter(logits.clone())
    losses = F.cross_entropy(policy.expand(len(tokens), -1), tokens, reduction="none")
    (losses * scores(rewards)).mean().backward()
    torch.optim.SGD([policy], lr=lr).step()
    return policy.detach()


@right("3.6")
def one_hot_minus_softmax(logits, tokens, rewards, lr):
    arrows = torch.eye(len(logits), dtype=logits.dtype)[tokens] - logits.softmax(dim=0)
    return logits + lr * torch.einsum("g,gv->v", scores(rewards), arrows) / len(rewards)


@right("3.6")
def ratios_of_one(logits, tokens, rewards, lr):
    def j(weights):
        log_p = torch.distributions.Categorical(logits=weights).log_prob(tokens)
        return ((log_p - log_p.detach()).exp() * scores(rewards)).mean()

    return logits + lr * torch.func.grad(j)(logits)
