"""Answers to the exercises of notebook 09."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from attack import right, wrong

INF, NAN = float("inf"), float("nan")


def doubles(*rows):
    return torch.tensor(rows, dtype=torch.float64)


LOSSES = doubles([0.5, -1.0, 2.0], [3.0, 0.25, -0.75])
HOLES = torch.tensor([[1, 0, 1], [0, 1, 0]])
USUAL = LOSSES, HOLES, torch.tensor([3, 5, 2])
DIRTY = LOSSES.masked_fill(HOLES == 0, NAN), HOLES, torch.tensor([3, 5, 2])
ENDLESS = LOSSES.masked_fill(HOLES == 0, -INF), HOLES.bool(), torch.tensor([3, 4])
ONE_IDLE = DIRTY[0], HOLES, torch.tensor([0, 3, 3])
NOTHING = DIRTY[0] * NAN, HOLES * 0, torch.tensor([0, 4, 3])
REAL_INF = doubles([INF, 1.0]), torch.tensor([[1, 1]]), torch.tensor([2, 3])


@wrong("9.1", *USUAL)
def own_token_mean(per_token, mask, tokens_per_rank):
    return torch.where(mask.bool(), per_token, 0.0).sum() / mask.sum().clamp(min=1)


@wrong("9.1", *USUAL)
def average_forgotten(per_token, mask, tokens_per_rank):
    return per_token[mask.bool()].sum() / tokens_per_rank.sum()


@wrong("9.1", *DIRTY)
def times_mask(per_token, mask, tokens_per_rank):
    return len(tokens_per_rank) * (per_token * mask).sum() / tokens_per_rank.sum()


@wrong("9.1", *USUAL)
def two_processes(per_token, mask, tokens_per_rank):
    return 2 * per_token[mask.bool()].sum() / tokens_per_rank.sum()


@wrong("9.1", *ONE_IDLE)
def processes_with_tokens(per_token, mask, tokens_per_rank):
    busy = tokens_per_rank[tokens_per_rank > 0]
    return per_token[mask.bool()].sum() / busy.double().mean()


@wrong("9.1", *ONE_IDLE)
def own_count_told_apart(per_token, mask, tokens_per_rank):
    own = mask.bool().sum()
    others = tokens_per_rank[tokens_per_rank != own].sum()
    return len(tokens_per_rank) * per_token[mask.bool()].sum() / (own + others)


@wrong("9.1", *ONE_IDLE)
def at_least_one_each(per_token, mask, tokens_per_rank):
    counts = tokens_per_rank.clamp(min=1)
    return len(counts) * per_token[mask == 1].sum() / counts.sum()


@wrong("9.1", *USUAL)
def whole_tokens_per_process(per_token, mask, tokens_per_rank):
    return per_token[mask.bool()].sum() / (tokens_per_rank.sum() // len(tokens_per_rank))


@wrong("9.1", *NOTHING)
def zero_without_graph(per_token, mask, tokens_per_rank):
    if not mask.any():
        return per_token.new_zeros(())
    return per_token[mask.bool()].sum() * len(tokens_per_rank) / tokens_per_rank.sum()


@wrong("9.1", *NOTHING)
def zero_times_the_sum(per_token, mask, tokens_per_rank):
    if mask.sum() == 0:
        return 0.0 * per_token.sum()
    return per_token[mask.bool()].sum() * len(tokens_per_rank) / tokens_per_rank.sum()


@wrong("9.1", *NOTHING)
def own_mean_times_share(per_token, mask, tokens_per_rank):
    share = mask.sum() / tokens_per_rank.sum()
    return len(tokens_per_rank) * share * per_token[mask.bool()].mean()


@wrong("9.1", *REAL_INF)
def nan_to_num_first(per_token, mask, tokens_per_rank):
    kept = per_token.nan_to_num(0.0, 0.0, 0.0) * mask
    return len(tokens_per_rank) * kept.sum() / tokens_per_rank.sum()


@wrong("9.1", *USUAL)
def int_mask_as_index(per_token, mask, tokens_per_rank):
    return len(tokens_per_rank) * per_token[mask].sum() / tokens_per_rank.sum()


@wrong("9.1", *USUAL)
def mean_of_sequences(per_token, mask, tokens_per_rank):
    rows = torch.where(mask.bool(), per_token, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    share = mask.sum() / tokens_per_rank.sum()
    return rows.mean() * share * len(tokens_per_rank)


@right("9.1")
def over_the_mean_count(per_token, mask, tokens_per_rank):
    return per_token.masked_select(mask != 0).sum() / tokens_per_rank.double().mean()


@right("9.1")
def python_numbers(per_token, mask, tokens_per_rank):
    counts = tokens_per_rank.tolist()
    kept = per_token.masked_fill(~mask.bool(), 0)
    return kept.sum() * (len(counts) / sum(counts))


@right("9.1")
def nansum_of_the_product(per_token, mask, tokens_per_rank):
    world, tokens = tokens_per_rank.numel(), tokens_per_rank.sum()
    return torch.where(mask == 0, NAN, per_token).nansum().mul(world).div(tokens)


@right("9.1")
def own_count_as_a_weight(per_token, mask, tokens_per_rank):
    own = mask.bool().sum()
    mean = per_token[mask.bool()].sum() / max(int(own), 1)
    return mean * (own * tokens_per_rank.shape[0] / tokens_per_rank.sum().double())


SPLIT = doubles([1.0, 0.0], [0.5, 3.0], [-2.0, 0.25]), 3, 1  # a group ends within process 1
THREE = doubles([1.0], [0.0], [4.0], [2.0], [2.5], [-1.0]), 3, 3
BLOCKS = doubles([1.0, 0, 2, 7], [0, 3, 5, 1]), 2, 1
SIX_OF_FOUR = doubles(*(torch.arange(12.0).reshape(3, 4).cos() * 3).tolist()), 6, 1
FAR = doubles([1e8, 1e8 + 1], [1e8 + 3, 1e8]), 4, 0
WILD = doubles([0.0] * 200 + [1.0]), 201, 0
EQUAL_ONES = doubles([1.0, 1.0, 1, 1.001], [0.0, 2, 0, 2]), 4, 0


def normed(groups):
    mean, std = groups.mean(dim=1, keepdim=True), groups.std(dim=1, keepdim=True)
    return (groups - mean) / (std + 1e-4)


@wrong("9.2", *SIX_OF_FOUR)
def own_rows_as_one_group(rewards_per_rank, group_size, rank):
    own = rewards_per_rank[rank]
    return (own - own.mean()) / (own.std() + 1e-4)


@wrong("9.2", *SPLIT)
def processes_in_columns(rewards_per_rank, group_size, rank):
    advantages = normed(rewards_per_rank.T.reshape(-1, group_size)).flatten()
    return advantages.view(-1, len(rewards_per_rank))[:, rank]


@wrong("9.2", *SPLIT)
def slice_of_group_size(rewards_per_rank, group_size, rank):
    advantages = normed(rewards_per_rank.reshape(-1, group_size)).flatten()
    return advantages[rank * group_size : (rank + 1) * group_size]


@wrong("9.2", *SPLIT)
def every_wth_row(rewards_per_rank, group_size, rank):
    return normed(rewards_per_rank.reshape(-1, group_size)).flatten()[rank :: len(rewards_per_rank)]


@wrong("9.2", *SPLIT)
def group_of_the_first_row(rewards_per_rank, group_size, rank):
    n = rewards_per_rank.shape[1]
    group = rewards_per_rank.reshape(-1, group_size)[rank * n // group_size]
    return (rewards_per_rank[rank] - group.mean()) / (group.std() + 1e-4)


@wrong("9.2", *THREE)
def with_one_neighbour(rewards_per_rank, group_size, rank):
    W, n = rewards_per_rank.shape
    flat, first = rewards_per_rank.flatten(), rank * n
    starts = [i // group_size * group_size for i in range(first, first + n)]
    groups = [flat[max(s, first - n) : min(s + group_size, first + 2 * n)] for s in starts]
    return torch.stack([(r - g.mean()) / (g.std() + 1e-4) for r, g in zip(flat[first:], groups)])


@wrong("9.2", *SIX_OF_FOUR)
def processes_per_group(rewards_per_rank, group_size, rank):
    per = max(1, group_size // rewards_per_rank.shape[1])
    block = rewards_per_rank[rank // per * per :][:per]
    return normed(block.reshape(-1, min(group_size, block.numel()))).view_as(block)[rank % per]


@wrong("9.2", *SPLIT)
def biased_std(rewards_per_rank, group_size, rank):
    groups = rewards_per_rank.reshape(-1, group_size)
    std = groups.std(dim=1, keepdim=True, correction=0)
    advantages = (groups - groups.mean(dim=1, keepdim=True)) / (std + 1e-4)
    return advantages.view_as(rewards_per_rank)[rank]


@wrong("9.2", *EQUAL_ONES)
def eps_within_the_root(rewards_per_rank, group_size, rank):
    groups = rewards_per_rank.reshape(-1, group_size)
    std = (groups.var(dim=1, keepdim=True) + 1e-8).sqrt()
    return ((groups - groups.mean(dim=1, keepdim=True)) / std).view_as(rewards_per_rank)[rank]


@wrong("9.2", *EQUAL_ONES)
def std_at_least_eps(rewards_per_rank, group_size, rank):
    groups = rewards_per_rank.reshape(-1, group_size)
    std = groups.std(dim=1, keepdim=True).clamp(min=1e-4)
    return ((groups - groups.mean(dim=1, keepdim=True)) / std).view_as(rewards_per_rank)[rank]


@wrong("9.2", *BLOCKS)
def std_of_the_batch(rewards_per_rank, group_size, rank):
    groups = rewards_per_rank.reshape(-1, group_size)
    advantages = (groups - groups.mean(dim=1, keepdim=True)) / (rewards_per_rank.std() + 1e-4)
    return advantages.view_as(rewards_per_rank)[rank]


@wrong("9.2", *FAR)
def mean_of_squares(rewards_per_rank, group_size, rank):
    groups = rewards_per_rank.reshape(-1, group_size)
    mean, square = groups.mean(1, keepdim=True), groups.square().mean(1, keepdim=True)
    var = (square - mean.square()).clamp(min=0) * group_size / (group_size - 1)
    return ((groups - mean) / (var.sqrt() + 1e-4)).view_as(rewards_per_rank)[rank]


@wrong("9.2", *WILD)
def cut_off_at_ten(rewards_per_rank, group_size, rank):
    advantages = normed(rewards_per_rank.reshape(-1, group_size)).clamp(-10, 10)
    return advantages.view_as(rewards_per_rank)[rank]


@wrong("9.2", *FAR)
def in_float32(rewards_per_rank, group_size, rank):
    return normed(rewards_per_rank.float().reshape(-1, group_size)).view_as(rewards_per_rank)[rank]


@right("9.2")
def row_by_row(rewards_per_rank, group_size, rank):
    n, flat = rewards_per_rank.shape[1], rewards_per_rank.flatten().tolist()
    out = []
    for i in range(rank * n, (rank + 1) * n):
        group = flat[i // group_size * group_size :][:group_size]
        mean = math.fsum(group) / group_size
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (group_size - 1))
        out.append((flat[i] - mean) / (std + 1e-4))
    return torch.tensor(out, dtype=rewards_per_rank.dtype)


@right("9.2")
def chunks_narrowed(rewards_per_rank, group_size, rank):
    n = rewards_per_rank.size(1)
    groups = torch.cat(list(rewards_per_rank)).split(group_size)
    return torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in groups]).narrow(0, rank * n, n)


@right("9.2")
def statistics_repeated(rewards_per_rank, group_size, rank):
    groups = rewards_per_rank.unflatten(0, (-1, 1)).flatten().unflatten(0, (-1, group_size))
    mean, std = (
        x.repeat_interleave(group_size).view_as(rewards_per_rank)[rank]
        for x in (groups.mean(dim=-1), groups.std(dim=-1))
    )
    return (rewards_per_rank[rank] - mean) / (std + 1e-4)


@right("9.2")
def only_the_groups_that_are_touched(rewards_per_rank, group_size, rank):
    n = rewards_per_rank.shape[1]
    first, last = rank * n // group_size, -(-(rank + 1) * n // group_size)
    groups = rewards_per_rank.reshape(-1, group_size)[first:last]
    start = rank * n - first * group_size
    return normed(groups).flatten()[start : start + n]


REAL = HOLES.bool()
TRAINER = doubles([-1.0, -0.5, -3.0], [-2.0, -0.3, -1.0])
SAMPLER = doubles([-1.2, -0.9, -1.5], [-1.0, -4.0, -1.0])
BATCH = LOSSES, TRAINER, SAMPLER, HOLES, 2.0
GARBAGE = (
    LOSSES,
    torch.where(REAL, TRAINER, torch.tensor(NAN).double()),
    torch.where(REAL, SAMPLER, torch.tensor(-INF).double()),
    HOLES,
    2.0,
)
LOSS_NAN = torch.where(REAL, LOSSES, torch.tensor(NAN).double()), TRAINER, SAMPLER, REAL, 3.0
NEVER = LOSSES, TRAINER.masked_fill(TRAINER == -1.0, -INF), SAMPLER, HOLES, 2.0
DEEP = LOSSES, TRAINER - 900, SAMPLER - 900, HOLES, 2.0
RARE = LOSSES * 1e4, TRAINER - 15, SAMPLER, HOLES, 2.0
HIGH_CAP = LOSSES, TRAINER, SAMPLER, HOLES, 50.0
EMPTY_ROW = LOSSES, TRAINER, SAMPLER, torch.tensor([[1.0, 1, 0], [0, 0, 0]]), 1.5


@wrong("9.3", *BATCH)
def sampler_over_trainer(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    weights = (sampler_log_probs - log_probs)[real].exp().clamp(max=cap).detach()
    return (weights * per_token[real]).mean()


@wrong("9.3", *BATCH)
def gradient_through_weights(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    weights = (log_probs[real] - sampler_log_probs[real]).exp().clamp(max=cap)
    return (weights * per_token[real]).mean()


def ratios(log_probs, sampler_log_probs, mask):
    return (log_probs - sampler_log_probs)[mask.bool()].exp().detach()


@wrong("9.3", *BATCH)
def cut_from_below_too(per_token, log_probs, sampler_log_probs, mask, cap):
    weights = ratios(log_probs, sampler_log_probs, mask).clamp(1 / cap, cap)
    return (weights * per_token[mask.bool()]).mean()


@wrong("9.3", *BATCH)
def zero_above_the_cap(per_token, log_probs, sampler_log_probs, mask, cap):
    weights = ratios(log_probs, sampler_log_probs, mask)
    return (weights * (weights <= cap) * per_token[mask.bool()]).mean()


@wrong("9.3", *GARBAGE)
def masked_at_the_end(per_token, log_probs, sampler_log_probs, mask, cap):
    weights = (log_probs - sampler_log_probs).exp().clamp(max=cap).detach()
    return torch.where(mask.bool(), weights * per_token, 0.0).sum() / mask.bool().sum()


@wrong("9.3", *LOSS_NAN)
def only_weights_masked(per_token, log_probs, sampler_log_probs, mask, cap):
    weights = (log_probs - sampler_log_probs).exp().clamp(max=cap).detach()
    return (weights.masked_fill(mask == 0, 0.0) * per_token).sum() / mask.sum()


@wrong("9.3", *DEEP)
def quotient_of_probabilities(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    weights = (log_probs[real].exp() / sampler_log_probs[real].exp()).clamp(max=cap)
    return (weights.detach() * per_token[real]).mean()


@wrong("9.3", *NEVER)
def impossible_tokens_not_counted(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool() & log_probs.isfinite()
    weights = ratios(log_probs, sampler_log_probs, real).clamp(max=cap)
    return (weights * per_token[real]).mean()


@wrong("9.3", *BATCH)
def divided_by_the_weights(per_token, log_probs, sampler_log_probs, mask, cap):
    weights = ratios(log_probs, sampler_log_probs, mask).clamp(max=cap)
    return (weights * per_token[mask.bool()]).sum() / weights.sum()


@wrong("9.3", *RARE)
def log_ratio_at_least_minus_ten(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    moved = (log_probs - sampler_log_probs)[real].detach().clamp(-10, math.log(cap))
    return (moved.exp() * per_token[real]).mean()


@wrong("9.3", *HIGH_CAP)
def cap_in_log_space_forgotten(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    moved = (log_probs - sampler_log_probs)[real].detach().clamp(max=cap)
    return (moved.exp().clamp(max=2.0) * per_token[real]).mean()


@wrong("9.3", *BATCH)
def loss_capped_not_weight(per_token, log_probs, sampler_log_probs, mask, cap):
    weighted = ratios(log_probs, sampler_log_probs, mask) * per_token[mask.bool()]
    return weighted.clamp(max=cap).mean()


@wrong("9.3", *EMPTY_ROW)
def mean_of_row_means(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    moved = torch.where(real, log_probs - sampler_log_probs, 0.0).detach()
    weighted = torch.where(real, per_token, 0.0) * moved.exp().clamp(max=cap)
    return (weighted.sum(dim=1) / real.sum(dim=1).clamp(min=1)).mean()


@wrong("9.3", *BATCH)
def ratio_of_the_sequence(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    moved = torch.where(real, log_probs - sampler_log_probs, 0.0).detach()
    weights = moved.sum(dim=1, keepdim=True).exp().clamp(max=cap).expand_as(moved)
    return (weights[real] * per_token[real]).mean()


@right("9.3")
def cap_in_log_space(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask != 0
    with torch.no_grad():
        weights = (log_probs - sampler_log_probs)[real].clamp(max=math.log(cap)).exp()
    return weights @ per_token[real] / real.sum()


@right("9.3")
def zeros_at_padding_first(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    losses, new, old = (x.where(real, 0.0) for x in (per_token, log_probs, sampler_log_probs))
    weights = (new - old).exp().detach().clamp_max(cap)
    return (losses * weights).sum() / real.sum()


@right("9.3")
def expm1_and_minimum(per_token, log_probs, sampler_log_probs, mask, cap):
    rows = mask.nonzero(as_tuple=True)
    weights = torch.expm1(log_probs.detach()[rows] - sampler_log_probs.detach()[rows]) + 1
    weights = torch.minimum(weights, torch.full_like(weights, cap))
    return torch.dot(weights, per_token[rows]) / weights.numel()


@right("9.3")
def token_by_token(per_token, log_probs, sampler_log_probs, mask, cap):
    total, where = 0.0, mask.nonzero().tolist()
    for i, j in where:
        weight = math.exp(min((log_probs[i, j] - sampler_log_probs[i, j]).item(), math.log(cap)))
        total = total + weight * per_token[i, j]
    return total / len(where)


LENGTHS = (torch.tensor([[3, 5, 1, 2], [10, 4, 10, 7], [2, 2, 1, 2]]),)
SHORTS = (torch.tensor([[900] * 39 + [1000], [700] * 40], dtype=torch.int16),)
ALONE = (torch.tensor([[3], [7]]),)


@wrong("9.4", *LENGTHS)
def mean_of_the_batches(lengths):
    return (1 - lengths.double().mean(dim=1) / lengths.max(dim=1).values).mean()


@wrong("9.4", *LENGTHS)
def longest_of_all(lengths):
    return 1 - lengths.sum() / (lengths.numel() * lengths.max())


@wrong("9.4", *LENGTHS)
def longest_along_batches(lengths):
    return 1 - lengths.sum() / (len(lengths) * lengths.max(dim=0).values.sum())


@wrong("9.4", *LENGTHS)
def busy_share(lengths):
    return lengths.sum() / (lengths.shape[1] * lengths.amax(dim=1).sum())


@wrong("9.4", *LENGTHS)
def no_waiting_between_batches(lengths):
    ticks = lengths.sum(dim=0).max()
    return 1 - lengths.sum() / (ticks * lengths.shape[1])


@wrong("9.4", *ALONE)
def longest_row_not_counted(lengths):
    longest = lengths.amax(dim=1, keepdim=True)
    return (longest - lengths).sum() / ((lengths.shape[1] - 1) * longest.sum())


@wrong("9.4", *LENGTHS)
def idle_per_token(lengths):
    return (lengths.amax(dim=1, keepdim=True) - lengths).sum() / lengths.sum()


@wrong("9.4", *LENGTHS)
def whole_division(lengths):
    places = lengths.shape[1] * lengths.amax(dim=1).sum()
    return 1.0 - lengths.sum() // places


@wrong("9.4", *LENGTHS)
def last_row_is_longest(lengths):
    return 1 - lengths.sum() / (lengths.shape[1] * lengths[:, -1].sum())


@wrong("9.4", *LENGTHS)
def batches_for_rows(lengths):
    return 1 - lengths.sum() / (len(lengths) * lengths.max(dim=1).values.sum())


@wrong("9.4", *LENGTHS)
def ticks_from_zero(lengths):
    ticks = torch.arange(int(lengths.max()))
    empty = (lengths[..., None] < ticks) & (ticks < lengths.amax(dim=1)[:, None, None])
    return empty.sum() / (lengths.shape[1] * lengths.amax(dim=1).sum())


@wrong("9.4", *LENGTHS)
def last_tick_left_out(lengths):
    longest = lengths.amax(dim=1, keepdim=True)
    return (longest - lengths).sum() / (lengths.shape[1] * (longest - 1).clamp(min=1).sum())


@wrong("9.4", *LENGTHS)
def rounded(lengths):
    share = 1 - lengths.sum() / (lengths.shape[1] * lengths.amax(dim=1).sum())
    return round(share.item(), 3)


@right("9.4")
def lists(lengths):
    rows = lengths.tolist()
    empty = sum(max(row) - length for row in rows for length in row)
    return empty / sum(max(row) * len(row) for row in rows)


@right("9.4")
def weighted_shares(lengths):
    longest = lengths.double().amax(dim=1)
    return ((1 - lengths.double().mean(dim=1) / longest) * longest).sum() / longest.sum()


@right("9.4")
def tick_by_tick(lengths):
    places = empty = 0
    for batch in lengths.long():
        going_on = batch[:, None] > torch.arange(int(batch.max()))
        places, empty = places + going_on.numel(), empty + int((~going_on).sum())
    return torch.tensor(empty / places)


@right("9.4")
def with_fractions(lengths):
    ticks = int(lengths.sort(dim=1, descending=True).values[:, 0].sum())
    return float(1 - Fraction(int(lengths.sum()), ticks * lengths.shape[1]))
