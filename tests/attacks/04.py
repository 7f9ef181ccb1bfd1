"""Answers to the exercises of notebook 04."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong

tensor = torch.tensor
NAN, INF = math.nan, math.inf


# 4.1: leave-one-out

ONE = tensor([6.0, 2.0, 1.0]), 3
TWO = tensor([6.0, 2.0, 1.0, -4.0, 0.5, 3.0]), 3
THREE = tensor([6.0, 2.0, -1.0, 5.0, 0.25, 3.0]), 2
TIES = tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0]), 3


@wrong("4.1", *ONE)
def own_mean(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


@wrong("4.1", *ONE)
def others_over_g(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - (groups.sum(dim=1, keepdim=True) - groups) / group_size).flatten()


@wrong("4.1", *TWO)
def others_of_all(rewards, group_size):
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


@wrong("4.1", *TWO)
def view_swapped(rewards, group_size):
    groups = rewards.view(group_size, -1)
    others = groups.sum(dim=0, keepdim=True) - groups
    return (groups - others / (group_size - 1)).flatten()


@wrong("4.1", *TWO)
def repeat_not_interleave(rewards, group_size):
    sums = rewards.view(-1, group_size).sum(dim=1).repeat(group_size)
    return rewards - (sums - rewards) / (group_size - 1)


@wrong("4.1", *TWO)
def in_place(rewards, group_size):
    groups = rewards.view(-1, group_size)
    groups -= (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return rewards


@wrong("4.1", *TWO)
def squeezed(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)).squeeze()


@wrong("4.1", *TIES)
def others_by_value(rewards, group_size):
    groups = rewards.view(-1, group_size)
    others = [g[g != r].mean() if (g != r).any() else r for g in groups for r in g]
    return rewards - torch.stack(others)


@wrong("4.1", *TWO)
def two_prompts_wired(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - groups.flip(1)).flatten()


@wrong("4.1", *TWO)
def next_one_only(rewards, group_size):
    return torch.cat([g - g.roll(-1) for g in rewards.split(group_size)])


@wrong("4.1", *TWO)
def floor_division(rewards, group_size):
    groups = rewards.view(-1, group_size)
    others = groups.sum(dim=1, keepdim=True) - groups
    return (groups - others // (group_size - 1)).flatten()


@wrong("4.1", *TWO)
def small_eps(rewards, group_size):
    groups = rewards.view(-1, group_size)
    others = groups.sum(dim=1, keepdim=True) - groups
    return (groups - others / (group_size - 1 + 1e-4)).flatten()


@wrong("4.1", *TWO)
def last_group_forgotten(rewards, group_size):
    out = torch.zeros_like(rewards)
    for i in range(0, len(rewards) - group_size, group_size):
        g = rewards[i : i + group_size]
        out[i : i + group_size] = g - (g.sum() - g) / (group_size - 1)
    return out


@wrong("4.1", *THREE)
def strided_groups(rewards, group_size):
    prompts = len(rewards) // group_size
    sums = rewards.view(group_size, prompts).sum(dim=0).repeat_interleave(group_size)
    return rewards - (sums - rewards) / (group_size - 1)


@wrong("4.1", *TWO)
def neighbours_by_window(rewards, group_size):
    n, out = len(rewards), torch.empty_like(rewards)
    for i in range(n):
        others = torch.cat([rewards[max(0, i - group_size + 1) : i], rewards[i + 1 :]])
        out[i] = rewards[i] - others[: group_size - 1].mean()
    return out


@right("4.1")
def scaled_mean(rewards, group_size):
    groups = rewards.unflatten(0, (-1, group_size))
    return ((groups - groups.mean(1, True)) * (group_size / (group_size - 1))).reshape(-1)


@functools.lru_cache
def others_matrix(size):
    return (1 - np.eye(size)) / (size - 1)


@right("4.1")
def numpy_matrix(rewards, group_size):
    table = rewards.detach().numpy().reshape(-1, group_size)
    advantages = table - np.einsum("pg,gh->ph", table, others_matrix(group_size))
    return torch.from_numpy(advantages.ravel()).to(rewards)


@right("4.1")
def removed_from_lists(rewards, group_size):
    out, values = [], rewards.tolist()
    for i, r in enumerate(values):
        start = i - i % group_size
        others = values[start:i] + values[i + 1 : start + group_size]
        out.append(r - sum(others) / len(others))
    return rewards.new_tensor(out)


@right("4.1")
def masked_means(rewards, group_size):
    group = torch.arange(len(rewards)) // group_size
    others = (group[:, None] == group) & ~torch.eye(len(rewards), dtype=torch.bool)
    return rewards - torch.stack([rewards[o].mean() for o in others])


# 4.2: three averages

LOSSES = tensor([[1.0, 5, NAN, INF], [4, 0, -3, 1], [7, -INF, 2, 9]])
HOLES = tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]])
NOTHING = tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]])
CLEAN = LOSSES.nan_to_num(2.0, 3.0, -4.0)
ROWS, TOKENS, CONSTANT = "sequence_mean", "token_mean", "constant"


def finish(kept, lengths, how, rows, max_length):
    """What is right in most of the answers."""
    if how == ROWS:
        return (kept.sum(dim=-1) / lengths.clamp(min=1)).mean()
    return kept.sum() / (lengths.sum() if how == TOKENS else rows * max_length)


@wrong("4.2", LOSSES, HOLES, TOKENS, 10)
def times_mask(per_token, mask, how, max_length):
    return finish(per_token * mask, mask.sum(-1), how, len(mask), max_length)


@wrong("4.2", LOSSES, HOLES, CONSTANT, 10)
def only_nan_removed(per_token, mask, how, max_length):
    kept = torch.where(per_token.isnan(), 0.0, per_token) * mask
    return finish(kept, mask.sum(-1), how, len(mask), max_length)


@wrong("4.2", LOSSES, HOLES, TOKENS, 10)
def prefix_taken(per_token, mask, how, max_length):
    n = mask.sum(-1).long()
    real = torch.arange(mask.shape[1]) < n[:, None]
    return finish(per_token.where(real, 0.0), n, how, len(mask), max_length)


@wrong("4.2", CLEAN, NOTHING, ROWS, 10)
def empty_rows_dropped(per_token, mask, how, max_length):
    kept, n = per_token.masked_fill(mask == 0, 0.0), mask.sum(-1)
    if how == ROWS:
        return (kept.sum(-1)[n > 0] / n[n > 0]).mean()
    return finish(kept, n, how, len(mask), max_length)


@wrong("4.2", CLEAN, NOTHING, ROWS, 10)
def nothing_over_nothing(per_token, mask, how, max_length):
    kept, n = per_token.masked_fill(mask == 0, 0.0), mask.sum(-1)
    if how == ROWS:
        return (kept.sum(-1) / n).mean()
    return finish(kept, n, how, len(mask), max_length)


@wrong("4.2", LOSSES, HOLES, CONSTANT, 10)
def width_for_max_length(per_token, mask, how, max_length):
    kept = per_token.masked_fill(mask == 0, 0.0)
    return kept.mean() if how == CONSTANT else finish(kept, mask.sum(-1), how, len(mask), 1)


@wrong("4.2", LOSSES, HOLES, CONSTANT, 3)
def at_least_the_width(per_token, mask, how, max_length):
    kept, L = per_token.masked_fill(mask == 0, 0.0), max(max_length, mask.shape[1])
    return finish(kept, mask.sum(-1), how, len(mask), L)


@wrong("4.2", LOSSES, HOLES, CONSTANT, 2)
def cut_at_max_length(per_token, mask, how, max_length):
    per_token, mask = per_token[:, :max_length], mask[:, :max_length]
    return finish(per_token.where(mask.bool(), 0.0), mask.sum(-1), how, len(mask), max_length)


@wrong("4.2", LOSSES, HOLES, ROWS, 10)
def zeros_not_counted(per_token, mask, how, max_length):
    kept = per_token.where(mask.bool(), 0.0)
    return finish(kept, (kept != 0).sum(-1), how, len(mask), max_length)


@wrong("4.2", LOSSES, HOLES, TOKENS, 10)
def eps_in_token_mean(per_token, mask, how, max_length):
    kept = per_token.where(mask.bool(), 0.0)
    if how == TOKENS:
        return kept.sum() / (mask.sum() + 1e-4)
    return finish(kept, mask.sum(-1), how, len(mask), max_length)


@wrong("4.2", LOSSES, HOLES, TOKENS, 10)
def indexed_by_mask(per_token, mask, how, max_length):
    if how == TOKENS:
        return per_token[mask].mean()
    return finish(per_token.where(mask.bool(), 0.0), mask.sum(-1), how, len(mask), max_length)


@wrong("4.2", LOSSES, HOLES, ROWS, 10)
def lengths_kept_as_column(per_token, mask, how, max_length):
    kept = per_token.where(mask.bool(), 0.0)
    if how == ROWS:
        return (kept.sum(-1) / mask.sum(-1, keepdim=True).clamp(min=1)).mean()
    return finish(kept, mask.sum(-1), how, len(mask), max_length)


@wrong("4.2", LOSSES, HOLES, TOKENS, 10)
def python_numbers(per_token, mask, how, max_length):
    rows = [[x for x, m in zip(*r) if m] for r in zip(per_token.tolist(), mask.tolist())]
    total = sum(map(sum, rows))
    if how == ROWS:
        return tensor(sum(sum(row) / max(len(row), 1) for row in rows) / len(rows))
    return tensor(total / (sum(map(len, rows)) if how == TOKENS else len(rows) * max_length))


@wrong("4.2", LOSSES, HOLES, TOKENS, 10)
def padding_overwritten(per_token, mask, how, max_length):
    per_token.data[mask == 0] = 0.0
    return finish(per_token, mask.sum(-1), how, len(mask), max_length)


@wrong("4.2", CLEAN, NOTHING, CONSTANT, 10)
def real_rows_in_constant(per_token, mask, how, max_length):
    kept, real = per_token.where(mask.bool(), 0.0), mask.any(-1).sum()
    return finish(kept, mask.sum(-1), how, real if how == CONSTANT else len(mask), max_length)


@wrong("4.2", CLEAN, NOTHING.bool(), TOKENS, 10)
def empty_row_counts_one(per_token, mask, how, max_length):
    kept, n = per_token.where(mask.bool(), 0.0), mask.sum(-1).clamp(min=1)
    return finish(kept, n, how, len(mask), max_length)


@right("4.2")
def weights_first(per_token, mask, how, max_length):
    m = mask.to(per_token)
    weight = {
        ROWS: m / m.sum(1, keepdim=True).clamp(min=1) / m.size(0),
        TOKENS: m / m.sum(),
        CONSTANT: m / (m.size(0) * max_length),
    }[how]
    return torch.einsum("nt,nt->", per_token.masked_fill(m == 0, 0), weight)


@right("4.2")
def rows_in_a_loop(per_token, mask, how, max_length):
    rows = [row[m > 0] for row, m in zip(per_token, mask)]
    if how == ROWS:
        return sum(row.mean() if row.numel() else row.sum() for row in rows) / len(rows)
    flat = torch.cat(rows)
    return flat.mean() if how == TOKENS else flat.sum() / len(rows) / max_length


@right("4.2")
def nan_to_num_then_mask(per_token, mask, how, max_length):
    kept, n = per_token.nan_to_num(0.0, 0.0, 0.0) * mask, mask.sum(-1)
    match how:
        case "sequence_mean":
            return torch.where(n > 0, kept.sum(-1) / n.clamp(min=1), 0).mean()
        case "token_mean":
            return kept.sum() / n.sum()
    return kept.sum() / (n.numel() * max_length)


AVERAGES = {
    ROWS: lambda x, m, L: x.masked_fill(~m, NAN).nanmean(1).nan_to_num(0.0).mean(),
    TOKENS: lambda x, m, L: x[m].mean(),
    CONSTANT: lambda x, m, L: x[m].sum() / (m.shape[0] * L),
}


@right("4.2")
def table_of_lambdas(per_token, mask, how, max_length):
    return AVERAGES[how](per_token, mask == 1, max_length)


# 4.3: the clipped loss of tokens

NEW = tensor([[0.5, 1.0, 1.5, 0.9], [0.5, 1.0, 1.5, 1.1], [3.0, 0.7, 1.25, 1.0]]).log() - 2
OLD = torch.full((3, 4), -2.0)
A = tensor([1.0, -1.0, -2.0])
SOME = tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 0]])
EVERY = torch.ones(3, 4)
DIRT = tensor([[0, 0, 0, NAN], [INF, 0, 0, 0], [0, -INF, 0, 900.0]])
PLAIN = NEW, OLD, A, SOME
DIRTY = NEW + DIRT, OLD - DIRT.flip(0).where(SOME == 0, 0.0), A, SOME
DEEP = tensor([[-900.0, -2, -1]]), tensor([[-901.0, -2, -900]]), tensor([-1.0]), tensor([[1, 1, 0]])
FAR = tensor([[-900.0, -2, 0]]), tensor([[-1.0, -2.5, 0]]), tensor([-1.0]), tensor([[1, 1, 1]])
UP = tensor([[-1.0, -2]]), tensor([[-31.0, -2]]), tensor([-1.0]), tensor([[1, 1]])


def clipped(ratio, column, low, high):
    return torch.minimum(ratio * column, ratio.clamp(1 - low, 1 + high) * column)


def row_mean(table, mask):
    return (torch.where(mask.bool(), table, 0.0).sum(-1) / mask.sum(-1)).mean()


def clean_ratio(new, old, mask):
    return torch.where(mask.bool(), new - old, 0.0).exp()


@wrong("4.3", *PLAIN, 0.2, 0.2)
def clamp_without_min(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    return -row_mean(ratio.clamp(1 - low, 1 + high) * advantages[:, None], mask)


@wrong("4.3", *PLAIN, 0.2, 0.2)
def min_before_sign(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    ratio = torch.minimum(ratio, ratio.clamp(1 - low, 1 + high))
    return -row_mean(ratio * advantages[:, None], mask)


@wrong("4.3", *PLAIN, 0.2, 0.4)
def bounds_swapped(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    return -row_mean(clipped(ratio, advantages[:, None], high, low), mask)


@wrong("4.3", *PLAIN, 0.2, 0.2)
def mean_of_tokens(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    return -clipped(ratio, advantages[:, None], low, high)[mask.bool()].mean()


@wrong("4.3", *DIRTY, 0.2, 0.2)
def where_after_exp(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = (log_probs - old_log_probs).exp()
    return -row_mean(clipped(ratio, advantages[:, None], low, high), mask)


@wrong("4.3", *DIRTY, 0.2, 0.2)
def multiplied_log_ratio(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = (log_probs.nan_to_num(0.0) * mask - old_log_probs * mask).exp()
    return -row_mean(clipped(ratio, advantages[:, None], low, high), mask)


@wrong("4.3", *DEEP, 0.2, 0.2)
def ratio_of_probabilities(log_probs, old_log_probs, advantages, mask, low, high):
    new, old = (x.masked_fill(mask == 0, 0.0).exp() for x in (log_probs, old_log_probs))
    return -row_mean(clipped(new / old, advantages[:, None], low, high), mask)


@wrong("4.3", *UP, 0.2, 0.2)
def log_ratio_clamped_at_20(log_probs, old_log_probs, advantages, mask, low, high):
    log_ratio = (log_probs - old_log_probs).masked_fill(mask == 0, 0.0).clamp(-20, 20)
    return -row_mean(clipped(log_ratio.exp(), advantages[:, None], low, high), mask)


@wrong("4.3", FAR[0], FAR[1], -FAR[2], FAR[3], 0.2, 0.2)
def terms_not_zero_counted(log_probs, old_log_probs, advantages, mask, low, high):
    terms = clipped(clean_ratio(log_probs, old_log_probs, mask), advantages[:, None], low, high)
    terms = terms * mask
    return -(terms.sum(-1) / (terms != 0).sum(-1).clamp(min=1)).mean()


@wrong("4.3", *FAR, 0.2, 0.2)
def zero_is_padding(log_probs, old_log_probs, advantages, mask, low, high):
    mask = mask.bool() & (log_probs != 0)
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    return -row_mean(clipped(ratio, advantages[:, None], low, high), mask)


@wrong("4.3", NEW[:, :3], OLD[:, :3], A, EVERY[:, :3], 0.2, 0.2)
def square_only(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    return -row_mean(clipped(ratio, advantages, low, high), mask)


@wrong("4.3", *PLAIN, 0.2, 0.2)
def cut_in_logs(log_probs, old_log_probs, advantages, mask, low, high):
    log_ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0)
    terms = [x.exp() * advantages[:, None] for x in (log_ratio, log_ratio.clamp(-low, high))]
    return -row_mean(torch.minimum(*terms), mask)


@wrong("4.3", *PLAIN, 0.2, 0.2)
def column_in_place(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    return -row_mean(clipped(ratio, advantages.unsqueeze_(1), low, high), mask)


@wrong("4.3", *PLAIN, 0.2, 0.2)
def capped_weight_times_log(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    terms = clipped(ratio, advantages[:, None], low, high)
    logs = log_probs.where(mask.bool(), 0.0)
    return -row_mean(terms.detach() * (1 + logs - logs.detach()), mask)


@wrong("4.3", *PLAIN, 0.2, 0.2)
def lengths_as_prefix(log_probs, old_log_probs, advantages, mask, low, high):
    losses = []
    for new, old, a, n in zip(log_probs, old_log_probs, advantages, mask.sum(-1).long()):
        losses.append(clipped((new[:n] - old[:n]).exp(), a, low, high).mean())
    return -torch.stack(losses).mean()


@right("4.3")
def rows_zipped(log_probs, old_log_probs, advantages, mask, low, high):
    total = 0.0
    for new, old, a, m in zip(log_probs, old_log_probs, advantages, mask.bool()):
        rho = torch.exp(new[m] - old[m])
        total = total + torch.max(-a * rho, -a * rho.clamp(min=1 - low, max=1 + high)).mean()
    return total / len(advantages)


@right("4.3")
def two_signs(log_probs, old_log_probs, advantages, mask, low, high):
    rho = torch.exp((log_probs - old_log_probs).masked_fill(~mask.bool(), 0))
    a = advantages.unsqueeze(-1).expand_as(rho)
    terms = torch.where(a > 0, rho.clamp(max=1 + high), rho.clamp(min=1 - low)) * a
    weight = mask / mask.sum(1, keepdim=True) / mask.shape[0]
    return -(terms * weight).sum()


@right("4.3")
def flat_tokens(log_probs, old_log_probs, advantages, mask, low, high):
    row, column = mask.nonzero(as_tuple=True)
    rho = (log_probs[row, column] - old_log_probs[row, column]).exp()
    worst = torch.stack([rho, rho.clip(1 - low, 1 + high)]).mul(advantages[row]).amin(0)
    open_ = (rho * advantages[row] <= worst).to(rho)
    worst = rho * advantages[row] * open_ + worst.detach() * (1 - open_)
    sums = torch.zeros_like(advantages, dtype=rho.dtype).index_add(0, row, worst)
    return -(sums / row.bincount(minlength=len(mask))).mean()


@right("4.3")
def only_new_cleaned(log_probs, old_log_probs, advantages, mask, low, high):
    real = mask == 1
    terms = clipped(
        (log_probs.where(real, 0) - old_log_probs).exp(), advantages.view(-1, 1), low=low, high=high
    )
    return terms.where(real, terms.new_tensor(0)).sum(1).div(real.sum(1)).mean().neg()


# 4.4: the KL with the right gradient

REF = OLD + tensor([0.5, -0.4, 0.1, 0.3])
THREE_PLAIN = NEW, OLD, REF, NOTHING
HALVES = tensor([[0.5]]).log(), tensor([[0.5]]).log(), tensor([[0.2]]).log(), tensor([[1]])
TABLES_DIRTY = NEW + DIRT, OLD, REF, SOME
ALL_DIRTY = NEW + DIRT, OLD - DIRT, REF - 2 * DIRT, SOME
LOW = tensor([[-900.0, -2.0]]), tensor([[-901.0, -2.0]]), tensor([[-899.5, -3.0]]), tensor([[1, 1]])
APART = tensor([[-9.0, -2.0]]), tensor([[-9.0, -2.5]]), tensor([[-2.0, -3.0]]), tensor([[1, 1]])
CERTAIN = tensor([[0.0, -2.0]]), tensor([[-1.0, -2.5]]), tensor([[-0.5, -3.0]]), tensor([[1, 1]])


def k3_of(new, ref, mask):
    x = torch.where(mask.bool(), ref - new, 0.0)
    return x.exp() - x - 1


@wrong("4.4", *THREE_PLAIN)
def k3_alone(log_probs, old_log_probs, ref_log_probs, mask):
    return k3_of(log_probs, ref_log_probs, mask)


@wrong("4.4", *THREE_PLAIN)
def ratio_detached(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = clean_ratio(log_probs, old_log_probs, mask).detach()
    return ratio * k3_of(log_probs, ref_log_probs, mask)


@wrong("4.4", *THREE_PLAIN)
def k3_detached(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    return ratio * k3_of(log_probs, ref_log_probs, mask).detach()


@wrong("4.4", *THREE_PLAIN)
def always_first_update(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = clean_ratio(log_probs, log_probs.detach(), mask)
    return ratio * k3_of(log_probs, ref_log_probs, mask)


@wrong("4.4", *HALVES)
def k3_the_other_way(log_probs, old_log_probs, ref_log_probs, mask):
    return clean_ratio(log_probs, old_log_probs, mask) * k3_of(ref_log_probs, log_probs, mask)


@wrong("4.4", *TABLES_DIRTY)
def where_at_the_end(log_probs, old_log_probs, ref_log_probs, mask):
    x = ref_log_probs - log_probs
    kl = (log_probs - old_log_probs).exp() * (x.exp() - x - 1)
    return torch.where(mask.bool(), kl, 0.0)


@wrong("4.4", *ALL_DIRTY)
def all_times_mask(log_probs, old_log_probs, ref_log_probs, mask):
    x = (ref_log_probs - log_probs) * mask
    return ((log_probs - old_log_probs) * mask).exp() * (x.exp() - x - 1)


@wrong("4.4", *LOW)
def quotients_of_exp(log_probs, old_log_probs, ref_log_probs, mask):
    tables = (log_probs, old_log_probs, ref_log_probs)
    new, old, ref = (x.masked_fill(mask == 0, 0.0).exp() for x in tables)
    return new / old * (ref / new - (ref / new).log() - 1)


@wrong("4.4", *APART)
def kl_clamped_at_10(log_probs, old_log_probs, ref_log_probs, mask):
    kl = k3_of(log_probs, ref_log_probs, mask).clamp(-10, 10)
    return clean_ratio(log_probs, old_log_probs, mask) * kl


@wrong("4.4", *CERTAIN)
def certain_is_padding(log_probs, old_log_probs, ref_log_probs, mask):
    mask = mask.bool() & (log_probs < 0)
    return clean_ratio(log_probs, old_log_probs, mask) * k3_of(log_probs, ref_log_probs, mask)


@wrong("4.4", *THREE_PLAIN)
def ratio_of_the_row(log_probs, old_log_probs, ref_log_probs, mask):
    log_ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0)
    return log_ratio.sum(-1, keepdim=True).exp() * k3_of(log_probs, ref_log_probs, mask)


@wrong("4.4", *HALVES)
def k2_for_k3(log_probs, old_log_probs, ref_log_probs, mask):
    d = torch.where(mask.bool(), log_probs - ref_log_probs, 0.0)
    return clean_ratio(log_probs, old_log_probs, mask) * d**2 / 2


@wrong("4.4", *THREE_PLAIN)
def flat_real_tokens(log_probs, old_log_probs, ref_log_probs, mask):
    kl = clean_ratio(log_probs, old_log_probs, mask) * k3_of(log_probs, ref_log_probs, mask)
    return kl[mask.bool()]


@wrong("4.4", *THREE_PLAIN)
def ratio_clipped_too(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = clean_ratio(log_probs, old_log_probs, mask).clamp(0.8, 1.2)
    return ratio * k3_of(log_probs, ref_log_probs, mask)


@wrong("4.4", *TABLES_DIRTY)
def dirt_in_log_probs_overwritten(log_probs, old_log_probs, ref_log_probs, mask):
    with torch.no_grad():
        for table in (log_probs, old_log_probs, ref_log_probs):
            table.masked_fill_(mask == 0, 0.0)
    return clean_ratio(log_probs, old_log_probs, mask) * k3_of(log_probs, ref_log_probs, mask)


@wrong("4.4", *THREE_PLAIN)
def slope_of_k2(log_probs, old_log_probs, ref_log_probs, mask):
    ratio, d = clean_ratio(log_probs, old_log_probs, mask), log_probs - ref_log_probs
    half = torch.where(mask.bool(), d, 0.0).square() / 2
    value = ratio * k3_of(log_probs, ref_log_probs, mask)
    return value.detach() + half - half.detach()


@right("4.4")
def three_terms(log_probs, old_log_probs, ref_log_probs, mask):
    gone = ~mask.bool()
    new, old, ref = (t.masked_fill(gone, 0) for t in (log_probs, old_log_probs, ref_log_probs))
    return torch.expm1(ref - new).sub(ref - new).mul(torch.exp(new - old))


@right("4.4")
def scattered(log_probs, old_log_probs, ref_log_probs, mask):
    real = mask > 0
    new, old, ref = log_probs[real], old_log_probs[real], ref_log_probs[real]
    kl = (new - old).exp() * ((ref - new).exp() - 1 + (new - ref))
    return torch.zeros_like(log_probs).masked_scatter(real, kl)


@right("4.4")
def cell_by_cell(log_probs, old_log_probs, ref_log_probs, mask):
    out = log_probs.new_zeros(mask.shape)
    for i, t in mask.nonzero().tolist():
        d = log_probs[i, t] - ref_log_probs[i, t]
        out[i, t] = (log_probs[i, t] - old_log_probs[i, t]).exp() * (d + (-d).exp() - 1)
    return out


@right("4.4")
def new_cleaned_and_end(log_probs, old_log_probs, ref_log_probs, mask):
    real = mask == 1
    new = torch.where(real, log_probs, torch.zeros_like(log_probs))
    kl = torch.exp(new - old_log_probs) * (torch.expm1(ref_log_probs - new) - ref_log_probs + new)
    return torch.where(real, kl, torch.zeros_like(kl))


# 4.5: the entropy bonus

LOGITS = tensor([[[0.7, 0, 0], [5, -3, 1], [2, 1, 0.5]], [[1, 1, -INF], [40, 0, 0], [0, 2.0, 0]]])
PART = tensor([[1, 0, 1], [0, 0, 1]])
FORBIDDEN = LOGITS, tensor([[1, 0, 1], [1, 0, 0]])
LARGE = tensor([[[1e3, 1e3 + 1, 0.0]], [[-3e4, -3e4, -3e4 - 1]]]), tensor([[1], [1]])
FLOOR = tensor([[[-1e12, -1e12, -INF]]]), tensor([[1]])
HUGE = tensor([[[1e12, 1e12, 0.0], [0, 1, 2]]]), tensor([[1, 1]])


def entropies(logits):
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(log_p == -INF, 0.0)).sum(-1)


def over_tokens(table, mask):
    return torch.where(mask.bool(), table, 0.0).sum() / mask.sum()


@wrong("4.5", *FORBIDDEN)
def log_of_softmax(logits, mask):
    p = logits.softmax(-1)
    return over_tokens(-(p * p.log()).sum(-1), mask)


@wrong("4.5", *FORBIDDEN)
def nan_made_zero(logits, mask):
    log_p = logits.log_softmax(-1)
    return over_tokens(-(log_p.exp() * log_p).nan_to_num(0.0).sum(-1), mask)


@wrong("4.5", *FORBIDDEN)
def where_on_the_product(logits, mask):
    log_p = logits.log_softmax(-1)
    terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * log_p)
    return -over_tokens(terms.sum(-1), mask)


@wrong("4.5", *FORBIDDEN)
def special_entr(logits, mask):
    return over_tokens(torch.special.entr(logits.softmax(-1)).sum(-1), mask)


@wrong("4.5", LOGITS, PART)
def small_number_in_log(logits, mask):
    p = logits.softmax(-1)
    return over_tokens(-(p * (p + 1e-5).log()).sum(-1), mask)


@wrong("4.5", *LARGE)
def logits_clamped(logits, mask):
    return over_tokens(entropies(logits.clamp(min=-1e4)), mask)


@wrong("4.5", *LARGE)
def naive_softmax(logits, mask):
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    log_p = torch.where(p > 0, p, 1.0).log()
    return over_tokens(-(p * log_p).sum(-1), mask)


@wrong("4.5", LOGITS, tensor([[1, 0, 1], [0, 0, 0]]))
def mean_of_row_means(logits, mask):
    kept = entropies(logits) * mask
    return (kept.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


@wrong("4.5", LOGITS, PART)
def padding_in_the_mean(logits, mask):
    return (entropies(logits) * mask).mean()


@wrong("4.5", LOGITS, PART)
def weights_detached(logits, mask):
    log_p = logits.log_softmax(-1)
    terms = log_p.exp().detach() * log_p.masked_fill(log_p == -INF, 0.0)
    return -over_tokens(terms.sum(-1), mask)


@wrong("4.5", *FORBIDDEN)
def forbidden_positions_skipped(logits, mask):
    real = mask.bool() & ~logits.isinf().any(-1)
    return over_tokens(entropies(logits), real)


@wrong("4.5", LOGITS, PART)
def mask_as_index(logits, mask):
    return entropies(logits)[mask.long()].mean()


@wrong("4.5", LOGITS, PART)
def in_bits(logits, mask):
    return over_tokens(entropies(logits), mask) / math.log(2)


@wrong("4.5", LOGITS, tensor([[0, 1, 1], [0, 0, 0]]))
def smallest_number_for_log(logits, mask):
    p = logits.softmax(-1)
    return over_tokens(-(p * p.clamp(min=1e-3).log()).sum(-1), mask)


@right("4.5")
def cross_entropy_with_itself(logits, mask):
    z = logits[mask.bool()]  # (tokens, V)
    z = torch.where(z == -INF, torch.finfo(z.dtype).min, F.log_softmax(z, dim=1))
    return -torch.einsum("nv,nv->n", z.exp(), z).mean()


@right("4.5")
def one_position_at_a_time(logits, mask):
    total, count = 0.0, 0
    for z, m in zip(logits.flatten(0, 1), mask.flatten().tolist()):
        if m:
            log_p = F.log_softmax(z[z > -INF], dim=-1)
            total, count = total - torch.dot(log_p.exp(), log_p), count + 1
    return total / count


@right("4.5")
def from_distributions(logits, mask):
    real = mask.reshape(-1) != 0
    return torch.distributions.Categorical(logits=logits.flatten(0, 1)[real]).entropy().mean()


@right("4.5")
def shifted_by_hand(logits, mask):
    z = logits - logits.amax(dim=-1, keepdim=True).detach()
    banned = z == float("-inf")
    z = z.masked_fill(banned, 0)
    e = z.exp().masked_fill(banned, 0)
    norm = e.sum(-1)
    H = norm.log() - (e * z).sum(-1) / norm
    return (H * mask).sum() / mask.sum()


# 4.6: the loss of GRPO

WHOLE = NEW, OLD, REF, A, SOME
WHOLE_TURNED = NEW, OLD, REF, -A, SOME
WHOLE_DIRTY = NEW + DIRT, OLD - DIRT, REF - 2 * DIRT, A, SOME
NEW_DIRTY = NEW + DIRT, OLD, REF, A, SOME
WHOLE_LOW = *LOW[:3], tensor([1.0]), LOW[3]
WHOLE_APART = *APART[:3], tensor([1.0]), APART[3]
WHOLE_UP = UP[0], UP[1], UP[0], UP[2], UP[3]


def plain(new, old, ref, A, mask, low, high, weight):
    """The right loss, with two bounds."""
    terms = clipped(clean_ratio(new, old, mask), A[:, None], low, high)
    return row_mean(weight * k3_of(new, ref, mask) - terms, mask)


@wrong("4.6", *WHOLE, 0.2, 0.1)
def k3_times_ratio(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    ratio = clean_ratio(log_probs, old_log_probs, mask)
    terms = clipped(ratio, advantages[:, None], clip, clip)
    return row_mean(kl_weight * ratio * k3_of(log_probs, ref_log_probs, mask) - terms, mask)


@wrong("4.6", *WHOLE, 0.2, 0.1)
def kl_rewarded(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    args = log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip
    return plain(*args, -kl_weight)


@wrong("4.6", *WHOLE, 0.2, 0.1)
def kl_to_old(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    args = log_probs, old_log_probs, old_log_probs, advantages, mask, clip, clip
    return plain(*args, kl_weight)


@wrong("4.6", *WHOLE, 0.0, 0.1)
def no_clip_at_zero(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    low, high = (clip, clip) if clip else (1.0, INF)
    args = log_probs, old_log_probs, ref_log_probs, advantages, mask
    return plain(*args, low, high, kl_weight)


@wrong("4.6", *WHOLE, 0.0, 0.1)
def default_clip(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    clip = clip or 0.2
    args = log_probs, old_log_probs, ref_log_probs, advantages, mask
    return plain(*args, clip, clip, kl_weight)


@wrong("4.6", *WHOLE_TURNED, 1.5, 0.1)
def clip_at_most_one(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    clip = min(clip, 1.0)
    args = log_probs, old_log_probs, ref_log_probs, advantages, mask
    return plain(*args, clip, clip, kl_weight)


@wrong("4.6", *WHOLE, 0.2, 3.0)
def mixed_weights(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    terms = clipped(clean_ratio(log_probs, old_log_probs, mask), advantages[:, None], clip, clip)
    kl = k3_of(log_probs, ref_log_probs, mask)
    return -row_mean(terms, mask) + kl_weight * over_tokens(kl, mask)


@wrong("4.6", *WHOLE, 0.2, 1.0)
def kl_inside_min(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    ratio, kl = clean_ratio(log_probs, old_log_probs, mask), k3_of(log_probs, ref_log_probs, mask)
    column = advantages[:, None] - kl_weight * kl
    return -row_mean(clipped(ratio, column, clip, clip), mask)


@wrong("4.6", *NEW_DIRTY, 0.2, 0.1)
def new_not_cleaned(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    terms = clipped(clean_ratio(log_probs, old_log_probs, mask), advantages[:, None], clip, clip)
    x = ref_log_probs - log_probs
    return row_mean(kl_weight * (x.exp() - x - 1) - terms, mask)


@wrong("4.6", *WHOLE_DIRTY, 0.2, 0.1)
def nan_to_num_for_mask(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    new, old, ref = (x.nan_to_num() for x in (log_probs, old_log_probs, ref_log_probs))
    x = ref - new
    terms = clipped((new - old).exp(), advantages[:, None], clip, clip)
    return row_mean(kl_weight * (x.exp() - x - 1) - terms, mask)


@wrong("4.6", *WHOLE_LOW, 0.2, 0.1)
def all_in_probabilities(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    tables = (log_probs, old_log_probs, ref_log_probs)
    new, old, ref = (x.masked_fill(mask == 0, 0.0).exp() for x in tables)
    kl = ref / new - (ref / new).log() - 1
    return row_mean(kl_weight * kl - clipped(new / old, advantages[:, None], clip, clip), mask)


@wrong("4.6", *WHOLE_APART, 0.2, 0.1)
def kl_clamped(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    terms = clipped(clean_ratio(log_probs, old_log_probs, mask), advantages[:, None], clip, clip)
    kl = k3_of(log_probs, ref_log_probs, mask).clamp(-10, 10)
    return row_mean(kl_weight * kl - terms, mask)


@wrong("4.6", *WHOLE_TURNED, 0.2, 0.1)
def reciprocal_bound(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    args = log_probs, old_log_probs, ref_log_probs, advantages, mask
    return plain(*args, 1 - 1 / (1 + clip), clip, kl_weight)


@wrong("4.6", *WHOLE_TURNED, 0.2, 0.1)
def upper_bound_alone(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    args = log_probs, old_log_probs, ref_log_probs, advantages, mask
    return plain(*args, 1.0, clip, kl_weight)


@wrong("4.6", *WHOLE, 0.2, 0.1)
def kl_without_gradient(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    terms = clipped(clean_ratio(log_probs, old_log_probs, mask), advantages[:, None], clip, clip)
    with torch.no_grad():
        kl = k3_of(log_probs, ref_log_probs, mask)
    return row_mean(kl_weight * kl - terms, mask)


@wrong("4.6", *WHOLE_UP, 0.2, 0.1)
def dual_clip(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    column = advantages[:, None]
    terms = clipped(clean_ratio(log_probs, old_log_probs, mask), column, clip, clip)
    terms = torch.where(column < 0, torch.maximum(terms, 3 * column), terms)
    return row_mean(kl_weight * k3_of(log_probs, ref_log_probs, mask) - terms, mask)


@right("4.6")
def grpo_row_by_row(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    losses = []
    for *tables, a, m in zip(log_probs, old_log_probs, ref_log_probs, advantages, mask):
        new, old, ref = (t[m.bool()] for t in tables)
        rho, q = torch.exp(new - old), ref - new
        bounded = torch.clamp(rho, 1 - clip, 1 + clip)
        losses.append((kl_weight * (torch.expm1(q) - q) + torch.max(-rho * a, -bounded * a)).mean())
    return torch.stack(losses).mean()


@right("4.6")
def grpo_by_sign(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    real = mask.bool()
    rho = (log_probs - old_log_probs).masked_fill(~real, 0).exp()
    d = (log_probs - ref_log_probs).masked_fill(~real, 0)
    a = advantages.reshape(-1, 1)
    push = a.clamp(min=0) * rho.clamp(max=1 + clip) + a.clamp(max=0) * rho.clamp(min=1 - clip)
    weight = real / real.sum(dim=1, keepdim=True)
    return ((kl_weight * (d + (-d).exp() - 1) - push) * weight).sum() / len(a)


@right("4.6")
def grpo_lower_bound_zero(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    n, (row, _) = mask.sum(1), mask.nonzero(as_tuple=True)
    new, old, ref = (t[mask != 0] for t in (log_probs, old_log_probs, ref_log_probs))
    rho, a = (new - old).exp(), advantages[row]
    surrogate = torch.minimum(a * rho, a * rho.clamp(max(0.0, 1.0 - clip), 1.0 + clip))
    tokens = kl_weight * ((ref - new).exp() + new - ref - 1) - surrogate
    return torch.einsum("k,k->", tokens, 1 / n[row].to(tokens)) / mask.size(0)


@right("4.6")
def grpo_two_losses(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    m = mask > 0
    new = log_probs.where(m, 0.0)

    def mean(table):
        return table.masked_fill(~m, 0).sum(1).div(m.sum(1)).mean()

    rho, q = torch.exp(new - old_log_probs), ref_log_probs - new
    pair = torch.stack((rho, rho.clip(1 - clip, 1 + clip))) * advantages[None, :, None]
    gain = torch.where(pair[0] <= pair[1], pair[0], pair[1])
    return kl_weight * mean(q.exp() - q - 1) - mean(gain)
