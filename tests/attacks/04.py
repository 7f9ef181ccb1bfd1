"""Answers to the exercises of notebook 04."""

from __future__ import annotations

import math

import torch
from attack import right, wrong

NAN, INF = math.nan, math.inf

# 4.1 ----------------------------------------------------------------------------------------------
PAIR = torch.tensor([6.0, 2.0, 1.0, 1.0, 0.0, -4.0]), 3
TIED = torch.tensor([1.0, 1.0, 0.0, 0.0]), 4
LOW = torch.tensor([-1.0, -2.0, -6.0]), 3


@wrong("4.1", *PAIR)
def own_reward_in_the_mean(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


@wrong("4.1", *PAIR)
def others_of_all_groups(rewards, group_size):
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


@wrong("4.1", *PAIR)
def others_over_group_size(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - (groups.sum(dim=1, keepdim=True) - groups) / group_size).flatten()


@wrong("4.1", *PAIR)
def rewards_overwritten(rewards, group_size):
    groups = rewards.view(-1, group_size)
    groups -= groups.mean(dim=1, keepdim=True)
    return rewards * group_size / (group_size - 1)


@wrong("4.1", *PAIR)
def group_size_many_groups(rewards, group_size):
    chunks = rewards.chunk(group_size)
    return torch.cat([g - (g.sum() - g) / max(len(g) - 1, 1) for g in chunks])


@wrong("4.1", *PAIR)
def left_as_a_table(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return groups - (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)


@wrong("4.1", *TIED)
def others_with_another_reward(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return torch.stack([r - g[g != r].mean().nan_to_num(r.item()) for g in groups for r in g])


@wrong("4.1", torch.arange(9.0) ** 2, 3)
def sums_without_keepdim(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - (groups.sum(dim=1) - groups) / (group_size - 1)).flatten()


@wrong("4.1", *PAIR)
def the_neighbour_alone(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - groups.roll(1, dims=1)).flatten()


@wrong("4.1", *LOW)
def baseline_not_below_zero(rewards, group_size):
    groups = rewards.view(-1, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others.clamp(min=0)).flatten()


@right("4.1")
def mean_rescaled(rewards, group_size):
    groups = rewards.reshape(-1, group_size)
    return (groups - groups.mean(1, True)).reshape(-1) * group_size / (group_size - 1)


@right("4.1")
def matrix_of_weights(rewards, group_size):
    eye = torch.eye(group_size, dtype=rewards.dtype)
    weights = eye - (1 - eye) / (group_size - 1)
    return torch.einsum("pj,ij->pi", rewards.unflatten(0, (-1, group_size)), weights).ravel()


@right("4.1")
def python_slices(rewards, group_size):
    out = rewards.clone()
    for i in range(len(rewards)):
        start = i // group_size * group_size
        rest = torch.cat([rewards[start:i], rewards[i + 1 : start + group_size]])
        out[i] -= rest.mean()
    return out


# 4.2 ----------------------------------------------------------------------------------------------
TABLE = torch.tensor([[1.0, 5.0, 9.0, NAN], [4.0, 0.0, INF, -3.0], [7.0, 8.0, -INF, 6.0]])
HOLES = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]])
SEQUENCE, TOKEN, CONSTANT = "sequence_mean", "token_mean", "constant"
FULL = TABLE[:, :2]


def three(kept, lengths, how, max_length):
    if how == SEQUENCE:
        return (kept.sum(-1) / lengths.clamp(min=1)).mean()
    return kept.sum() / (lengths.sum() if how == TOKEN else len(kept) * max_length)


@wrong("4.2", TABLE, HOLES, SEQUENCE, 10)
def empty_rows_leave_n(per_token, mask, how, max_length):
    rows = mask.bool().any(-1)
    kept = per_token[rows].masked_fill(~mask[rows].bool(), 0.0)
    return three(kept, mask[rows].sum(-1), how, max_length)


@wrong("4.2", TABLE, HOLES, CONSTANT, 10)
def constant_without_rows(per_token, mask, how, max_length):
    kept = per_token.masked_fill(~mask.bool(), 0.0)
    return three(kept, mask.sum(-1), how, max_length / len(mask))


@wrong("4.2", TABLE, HOLES, SEQUENCE, 10)
def zeros_do_not_count(per_token, mask, how, max_length):
    kept = torch.where(mask.bool(), per_token, 0.0)
    return three(kept, (kept != 0).sum(-1), how, max_length)


@wrong("4.2", TABLE, HOLES, CONSTANT, 3)
def cut_at_max_length(per_token, mask, how, max_length):
    kept = torch.where(mask.bool(), per_token, 0.0)
    if how == CONSTANT:
        kept = kept[:, :max_length]
    return three(kept, mask.sum(-1), how, max_length)


@wrong("4.2", TABLE, HOLES, CONSTANT, 3)
def at_least_the_width(per_token, mask, how, max_length):
    kept = torch.where(mask.bool(), per_token, 0.0)
    return three(kept, mask.sum(-1), how, max(max_length, mask.shape[1]))


@wrong("4.2", TABLE, HOLES.bool(), TOKEN, 10)
def one_minus_a_bool(per_token, mask, how, max_length):
    kept = per_token.masked_fill((1 - mask).bool(), 0.0)
    return three(kept, mask.sum(-1), how, max_length)


@wrong("4.2", TABLE, HOLES, SEQUENCE, 10)
def empty_rows_with_a_nan_gradient(per_token, mask, how, max_length):
    kept, n = per_token.nan_to_num() * mask, mask.sum(-1)
    if how == SEQUENCE:
        return torch.where(n > 0, kept.sum(-1) / n, 0.0).mean()
    return three(kept, n, how, max_length)


@wrong("4.2", TABLE, HOLES, TOKEN, 10)
def padding_wiped_in_place(per_token, mask, how, max_length):
    per_token.data[~mask.bool()] = 0.0
    return three(per_token, mask.sum(-1), how, max_length)


@right("4.2")
def nan_to_num_first(per_token, mask, how, max_length):
    weights = mask.to(per_token.dtype)
    per_row = torch.einsum("nt,nt->n", per_token.nan_to_num(0.0, 0.0, 0.0), weights)
    counts = weights.sum(dim=1)
    if how == SEQUENCE:
        return (per_row / torch.maximum(counts, torch.ones_like(counts))).mean()
    return per_row.sum() / {TOKEN: counts.sum(), CONSTANT: counts.numel() * max_length}[how]


@right("4.2")
def rows_in_a_list(per_token, mask, how, max_length):
    texts = [row[keep] for row, keep in zip(per_token, mask == 1)]
    if how == "token_mean":
        return torch.cat(texts).mean()
    scale = [max(len(t), 1) if how == "sequence_mean" else max_length for t in texts]
    return sum(t.sum() / s for t, s in zip(texts, scale)) / len(texts)


@right("4.2")
def weights_per_token(per_token, mask, how, max_length):
    real, n = mask > 0, mask.shape[0]
    own = real.sum(dim=1, keepdim=True).expand(real.shape)[real]
    all_tokens = torch.full_like(own, int(real.sum()))
    share = {SEQUENCE: n * own, TOKEN: all_tokens, CONSTANT: n * max_length + 0 * own}[how]
    return (per_token[real] / share).sum()


# 4.3 ----------------------------------------------------------------------------------------------
OLD = torch.tensor([[-1.0, -2.0, -3.0], [-1.5, -1.0, -2.0], [-4.0, -3.0, -2.0]])
NEW = OLD + torch.tensor([[-0.6, 0.1, 0.5], [-0.6, 0.0, 0.4], [1.6, -0.3, 0.2]])
ADVANTAGES = torch.tensor([1.0, -1.0, -0.5])
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0]])
CLEAN = NEW, OLD, ADVANTAGES, MASK, 1.3


def row_means(table, mask):
    return torch.where(mask.bool(), table, 0.0).sum(-1) / mask.sum(-1)


def safe(new, old, mask):
    return torch.where(mask.bool(), new - old, 0.0)


def capped(log_probs, old_log_probs, mask, cap):
    return safe(log_probs, old_log_probs, mask).exp().clamp(max=cap).detach()


@wrong("4.3", *CLEAN)
def product_rule(log_probs, old_log_probs, advantages, mask, cap):
    weight = safe(log_probs, old_log_probs, mask).exp().clamp(max=cap)
    return -row_means(weight * advantages[:, None] * log_probs, mask).mean()


@wrong("4.3", *CLEAN)
def advantage_detached_instead(log_probs, old_log_probs, advantages, mask, cap):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return -row_means(torch.clamp(ratio, max=cap) * advantages.detach()[:, None], mask).mean()


@wrong("4.3", *CLEAN)
def clipped_tokens_left_out(log_probs, old_log_probs, advantages, mask, cap):
    ratio, A = safe(log_probs, old_log_probs, mask).exp().detach(), advantages[:, None]
    return -row_means(torch.where(ratio <= cap, ratio, 0.0) * A * log_probs, mask).mean()


@wrong("4.3", *CLEAN)
def cap_for_praise_only(log_probs, old_log_probs, advantages, mask, cap):
    ratio, A = safe(log_probs, old_log_probs, mask).exp(), advantages[:, None]
    weight = torch.where(A > 0, ratio.clamp(max=cap), ratio).detach()
    return -row_means(weight * A * log_probs, mask).mean()


@wrong("4.3", *CLEAN)
def both_sides_in_log_space(log_probs, old_log_probs, advantages, mask, cap):
    d, bound = safe(log_probs, old_log_probs, mask).detach(), math.log(cap)
    return -row_means(d.clamp(-bound, bound).exp() * advantages[:, None] * log_probs, mask).mean()


@wrong("4.3", *CLEAN)
def difference_instead_of_log_prob(log_probs, old_log_probs, advantages, mask, cap):
    weight = capped(log_probs, old_log_probs, mask, cap) * advantages[:, None]
    return -row_means(weight * (log_probs - log_probs.detach()), mask).mean()


@wrong("4.3", *CLEAN)
def advantages_along_the_tokens(log_probs, old_log_probs, advantages, mask, cap):
    weight = capped(log_probs, old_log_probs, mask, cap)
    return -row_means(weight * advantages * log_probs, mask).mean()


@wrong("4.3", *CLEAN)
def every_token_of_the_batch_alike(log_probs, old_log_probs, advantages, mask, cap):
    weight = capped(log_probs, old_log_probs, mask, cap)
    terms = torch.where(mask.bool(), weight * advantages[:, None] * log_probs, 0.0)
    return -terms.sum() / mask.sum()


@wrong("4.3", *CLEAN)
def weights_scaled_to_a_mean_of_one(log_probs, old_log_probs, advantages, mask, cap):
    weight = capped(log_probs, old_log_probs, mask, cap)
    weight = weight / row_means(weight, mask)[:, None]
    return -row_means(weight * advantages[:, None] * log_probs, mask).mean()


@right("4.3")
def token_by_token(log_probs, old_log_probs, advantages, mask, cap):
    total = 0.0
    for new, old, a, keep in zip(log_probs, old_log_probs, advantages, mask.bool()):
        with torch.no_grad():
            weight = (new[keep] - old[keep]).clamp(max=math.log(cap)).exp() * a
        total = total - weight @ new[keep] / len(weight)
    return total / len(mask)


@right("4.3")
def picked_and_weighted(log_probs, old_log_probs, advantages, mask, cap):
    i, t = (mask > 0.5).nonzero(as_tuple=True)
    rho = torch.exp(log_probs.detach()[i, t] - old_log_probs[i, t])
    each = 1 / (len(mask) * (mask > 0.5).sum(1)[i])
    weight = torch.minimum(rho, rho.new_tensor(cap)) * advantages[i]
    return -(each * weight * log_probs[i, t]).sum()


@right("4.3")
def inputs_filled_first(log_probs, old_log_probs, advantages, mask, cap):
    hidden = mask == 0
    new, old = log_probs.masked_fill(hidden, 0.0), old_log_probs.masked_fill(hidden, 0.0)
    weight = (new.detach() - old).exp()
    weight = weight.masked_fill(weight > cap, cap) * advantages.unsqueeze(1)
    return ((-weight * new).sum(1) / (~hidden).sum(1)).mean()
