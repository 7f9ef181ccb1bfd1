"""Answers to the exercises of notebook 10."""

from __future__ import annotations

from math import inf

import torch
from attack import right, wrong

MASK = torch.tensor([[0, 1, 1], [1, 0, 0]])
LOSSES = torch.tensor([[1.0, 2.0, -3.0], [0.5, 7.0, 4.0]], dtype=torch.double)
RANKS = LOSSES, MASK, torch.tensor([3, 0, 5])
NONE = LOSSES, 0 * MASK, torch.tensor([3, 0, 5])


def kept_sum(per_token, mask):
    return torch.where(mask.bool(), per_token, 0.0).sum()


@wrong("10.1", *RANKS)
def mean_of_this_process(per_token, mask, tokens_per_rank):
    return kept_sum(per_token, mask) / mask.sum().clamp(min=1)


@wrong("10.1", *RANKS)
def not_times_processes(per_token, mask, tokens_per_rank):
    return kept_sum(per_token, mask) / tokens_per_rank.sum()


@wrong("10.1", *RANKS)
def processes_with_tokens(per_token, mask, tokens_per_rank):
    return kept_sum(per_token, mask) * (tokens_per_rank > 0).sum() / tokens_per_rank.sum()


@wrong("10.1", *NONE)
def constant_without_tokens(per_token, mask, tokens_per_rank):
    if not mask.any():
        return torch.zeros((), dtype=per_token.dtype)
    return len(tokens_per_rank) * kept_sum(per_token, mask) / tokens_per_rank.sum()


@wrong("10.1", *RANKS)
def lengths_of_rows(per_token, mask, tokens_per_rank):
    real = torch.arange(mask.shape[1]) < mask.long().sum(dim=1, keepdim=True)
    return len(tokens_per_rank) * kept_sum(per_token, real) / tokens_per_rank.sum()


@wrong("10.1", *NONE)
def mean_times_share(per_token, mask, tokens_per_rank):
    share = mask.sum() / tokens_per_rank.sum()
    return per_token[mask.bool()].mean() * share * len(tokens_per_rank)


@wrong("10.1", *RANKS)
def whole_tokens_per_process(per_token, mask, tokens_per_rank):
    return kept_sum(per_token, mask) / (tokens_per_rank.sum() // len(tokens_per_rank))


@wrong("10.1", *RANKS)
def at_least_one_token_each(per_token, mask, tokens_per_rank):
    total = tokens_per_rank.clamp(min=1).sum()
    return len(tokens_per_rank) * kept_sum(per_token, mask) / total


@right("10.1")
def sum_of_the_chosen(per_token, mask, tokens_per_rank):
    factor = tokens_per_rank.numel() / tokens_per_rank.sum().item()
    return factor * per_token[mask != 0].sum()


@right("10.1")
def over_the_mean_number(per_token, mask, tokens_per_rank):
    return per_token.masked_fill(mask == 0, 0).sum() / tokens_per_rank.double().mean()


@right("10.1")
def row_after_row(per_token, mask, tokens_per_rank):
    rows = [row[m.bool()].sum() for row, m in zip(per_token, mask)]
    return sum(rows) * len(tokens_per_rank) / sum(tokens_per_rank.tolist())


REWARDS = torch.tensor([[1.0, 0, 0.5], [2, -1, 0], [3, 3, 1], [0, 0.25, 4]]).double()
SPLIT = REWARDS, 4, 1
WIDE = torch.eye(16).double()[:2], 16, 0
SMALL = torch.tensor([[0.5, 0.51], [0.52, 0.51]]), 4, 0
SINGLE = torch.tensor([[1.0], [2.0], [0.0], [4.0]]).double(), 2, 2


def z_scores(groups, eps=1e-4):
    return (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + eps)


@wrong("10.2", *SPLIT)
def only_its_own_rows(rewards_per_rank, group_size, rank):
    own = rewards_per_rank[rank]
    return torch.cat([z_scores(part[None])[0] for part in own.split(group_size)])


@wrong("10.2", *SPLIT)
def biased_std(rewards_per_rank, group_size, rank):
    groups = rewards_per_rank.reshape(-1, group_size)
    std, mean = torch.std_mean(groups, dim=1, correction=0, keepdim=True)
    return ((groups - mean) / (std + 1e-4)).view_as(rewards_per_rank)[rank]


@wrong("10.2", *SPLIT)
def rank_times_group_size(rewards_per_rank, group_size, rank):
    flat = z_scores(rewards_per_rank.reshape(-1, group_size)).flatten()
    return flat[rank * group_size :][: rewards_per_rank.shape[1]]


@wrong("10.2", *SPLIT)
def processes_interleaved(rewards_per_rank, group_size, rank):
    advantages = z_scores(rewards_per_rank.T.reshape(-1, group_size))
    return advantages.view(-1, len(rewards_per_rank))[:, rank]


@wrong("10.2", REWARDS, 4, 1)
def group_ends_forgotten(rewards_per_rank, group_size, rank):
    n, flat = rewards_per_rank.shape[1], rewards_per_rank.flatten()
    first = rank * n // group_size * group_size
    groups = flat[first:][: -(-n // group_size) * group_size].view(-1, group_size)
    return z_scores(groups).flatten()[rank * n - first :][:n]


@wrong("10.2", *SMALL)
def variance_and_eps(rewards_per_rank, group_size, rank):
    groups = rewards_per_rank.reshape(-1, group_size)
    var, mean = torch.var_mean(groups, dim=1, keepdim=True)
    return ((groups - mean) / (var + 1e-8).sqrt()).view_as(rewards_per_rank)[rank]


@wrong("10.2", torch.eye(16).double()[:1].view(4, 4), 16, 0)
def at_most_three(rewards_per_rank, group_size, rank):
    advantages = z_scores(rewards_per_rank.reshape(-1, group_size)).clamp(-3, 3)
    return advantages.view_as(rewards_per_rank)[rank]


@wrong("10.2", *SINGLE)
def squeezed_row(rewards_per_rank, group_size, rank):
    flat = z_scores(rewards_per_rank.reshape(-1, group_size)).flatten()
    return flat.chunk(len(rewards_per_rank))[rank].squeeze()


@right("10.2")
def row_by_row(rewards_per_rank, group_size, rank):
    flat, n = rewards_per_rank.flatten(), rewards_per_rank.shape[1]
    out = []
    for i in range(rank * n, rank * n + n):
        group = flat[i // group_size * group_size :][:group_size]
        out.append((flat[i] - group.mean()) / (group.std() + 1e-4))
    return torch.stack(out)


@right("10.2")
def all_then_its_part(rewards_per_rank, group_size, rank):
    groups = torch.cat(list(rewards_per_rank)).split(group_size)
    advantages = torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in groups])
    return advantages.split(rewards_per_rank.shape[1])[rank]


@right("10.2")
def repeated_statistics(rewards_per_rank, group_size, rank):
    n = rewards_per_rank.shape[1]
    groups = rewards_per_rank.contiguous().view(-1, group_size)
    std, mean = (x.repeat_interleave(group_size) for x in torch.std_mean(groups, dim=1))
    own = slice(rank * n, (rank + 1) * n)
    return (rewards_per_rank[rank] - mean[own]) / (std[own] + 1e-4)


TRAINER = torch.tensor([[-1.0, -0.2, -3.0], [-0.5, -2.0, -1.0]]).double()
SAMPLER = torch.tensor([[-1.2, -0.7, -1.0], [-2.5, -2.0, -1.5]]).double()
OFF = LOSSES, TRAINER, SAMPLER, MASK, 3.0
NEVER = (
    LOSSES,
    TRAINER.clone().index_put_((torch.tensor(0), torch.tensor(1)), -LOSSES.new_tensor(inf)),
    SAMPLER,
    MASK,
    3.0,
)
RARE = LOSSES, TRAINER - 30, SAMPLER - 30, MASK, 3.0


def weigh(log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    return (log_probs[real] - sampler_log_probs[real]).exp().clamp(max=cap).detach()


@wrong("10.3", *OFF)
def weight_learns(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    ratio = (log_probs[real] - sampler_log_probs[real]).exp()
    return (ratio.clamp(max=cap) * per_token[real]).mean()


@wrong("10.3", *OFF)
def sampler_over_trainer(per_token, log_probs, sampler_log_probs, mask, cap):
    weights = weigh(sampler_log_probs, log_probs, mask, cap)
    return (weights * per_token[mask.bool()]).mean()


@wrong("10.3", *NEVER)
def cut_below_too(per_token, log_probs, sampler_log_probs, mask, cap):
    weights = weigh(log_probs, sampler_log_probs, mask, cap).clamp(min=1 / cap)
    return (weights * per_token[mask.bool()]).mean()


@wrong("10.3", *NEVER)
def impossible_does_not_count(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool() & log_probs.isfinite()
    weights = weigh(log_probs, sampler_log_probs, real, cap)
    return (weights * per_token[real]).mean()


@wrong("10.3", *RARE)
def eps_below_the_fraction(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    ratio = log_probs[real].exp() / (sampler_log_probs[real].exp() + 1e-10)
    return (ratio.clamp(max=cap).detach() * per_token[real]).mean()


@wrong("10.3", *OFF)
def divided_by_the_weights(per_token, log_probs, sampler_log_probs, mask, cap):
    weights = weigh(log_probs, sampler_log_probs, mask, cap)
    return (weights * per_token[mask.bool()]).sum() / weights.sum()


@wrong("10.3", *OFF)
def cap_of_two(per_token, log_probs, sampler_log_probs, mask, cap=2.0):
    weights = weigh(log_probs, sampler_log_probs, mask, 2.0)
    return (weights * per_token[mask.bool()]).mean()


@wrong("10.3", *OFF)
def cap_on_the_log(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    weights = (log_probs[real] - sampler_log_probs[real]).clamp(max=cap).exp().detach()
    return (weights * per_token[real]).mean()


@right("10.3")
def chosen_first(per_token, log_probs, sampler_log_probs, mask, cap):
    weights = weigh(log_probs, sampler_log_probs, mask, cap)
    return torch.dot(weights, per_token[mask.bool()]) / len(weights)


@right("10.3")
def zeros_before_all(per_token, log_probs, sampler_log_probs, mask, cap):
    loss, new, old = (
        x.masked_fill(mask == 0, 0) for x in (per_token, log_probs, sampler_log_probs)
    )
    with torch.no_grad():
        weights = torch.exp(new - old).clamp_max(cap)
    return (weights * loss).sum() / mask.count_nonzero()


@right("10.3")
def place_by_place(per_token, log_probs, sampler_log_probs, mask, cap):
    places, total = mask.nonzero().tolist(), 0.0
    for i, t in places:
        ratio = (log_probs[i, t] - sampler_log_probs[i, t]).exp().item()
        total = total + min(ratio, cap) * per_token[i, t]
    return total / len(places)


UNEVEN = (torch.tensor([[3, 9, 1, 2], [20, 5, 6, 1], [2, 2, 2, 2]]),)
COLUMN = (torch.tensor([[3], [9], [1]]),)


def share_of(lengths):
    return 1 - lengths.double().mean(dim=1) / lengths.amax(dim=1)  # of each batch


@wrong("10.4", *UNEVEN)
def mean_of_shares(lengths):
    return share_of(lengths).mean()


@wrong("10.4", *UNEVEN)
def longest_of_all(lengths):
    return 1 - lengths.sum() / (lengths.max() * lengths.numel())


@wrong("10.4", *UNEVEN)
def busy_share(lengths):
    return lengths.sum() / (lengths.amax(dim=1).sum() * lengths.shape[1])


@wrong("10.4", *UNEVEN)
def longest_of_columns(lengths):
    return 1 - lengths.sum() / (lengths.max(dim=0).values.sum() * len(lengths))


@wrong("10.4", *UNEVEN)
def batches_for_rows(lengths):
    return 1 - lengths.sum() / (lengths.max(dim=1).values.sum() * len(lengths))


@wrong("10.4", *UNEVEN)
def empty_over_busy(lengths):
    empty = (lengths.amax(dim=1, keepdim=True) - lengths).sum()
    return empty / lengths.sum()


@wrong("10.4", *COLUMN)
def squeezed_lengths(lengths):
    lengths = lengths.squeeze()
    longest = lengths.max(dim=-1, keepdim=True).values
    return 1 - lengths.sum() / longest.expand_as(lengths).sum()


@wrong("10.4", *UNEVEN)
def weighted_by_tokens(lengths):
    tokens = lengths.sum(dim=1)
    return (share_of(lengths) * tokens).sum() / tokens.sum()


@wrong("10.4", *UNEVEN)
def places_of_the_others(lengths):
    longest = lengths.amax(dim=1)
    return (longest[:, None] - lengths).sum() / (longest.sum() * max(lengths.shape[1] - 1, 1))


@wrong("10.4", *UNEVEN)
def rounded(lengths):
    return round((1 - lengths.sum() / (lengths.amax(1).sum() * lengths.shape[1])).item(), 3)


@right("10.4")
def tick_after_tick(lengths):
    empty = places = 0
    for batch in lengths.tolist():
        for tick in range(max(batch)):
            empty += sum(length <= tick for length in batch)
            places += len(batch)
    return empty / places


@right("10.4")
def ratio_of_means(lengths):
    return 1 - lengths.double().mean() / lengths.double().amax(dim=-1).mean()


@right("10.4")
def with_numpy(lengths):
    rows = lengths.numpy()
    longest = rows.max(axis=1, keepdims=True)
    return float((longest - rows).sum() / (longest + 0 * rows).sum())
