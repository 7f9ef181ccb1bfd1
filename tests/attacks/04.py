"""Answers to the exercises of notebook 04."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
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


@wrong("4.2", TABLE, HOLES, TOKEN, 10)
def garbage_times_zero(per_token, mask, how, max_length):
    return three(per_token * mask, mask.sum(-1), how, max_length)


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


@wrong("4.2", TABLE, HOLES, SEQUENCE, 10)
def eps_in_the_lengths(per_token, mask, how, max_length):
    kept = torch.where(mask.bool(), per_token, 0.0)
    if how == SEQUENCE:
        return (kept.sum(-1) / (mask.sum(-1) + 1e-4)).mean()
    return three(kept, mask.sum(-1), how, max_length)


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
CLEAN = NEW, OLD, ADVANTAGES, MASK, 0.1, 0.3
DIRTY = NEW.masked_fill(MASK == 0, NAN), OLD, ADVANTAGES, MASK, 0.1, 0.3
RARE = torch.tensor([[-900.0, -1.0]]), torch.tensor([[-900.1, -1.0]])
LONE = torch.tensor([-1.0]), torch.tensor([[1, 1]])


def terms(ratio, A, low, high):
    return torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


def row_means(table, mask):
    return torch.where(mask.bool(), table, 0.0).sum(-1) / mask.sum(-1)


def safe(new, old, mask):
    return torch.where(mask.bool(), new - old, 0.0)


@wrong("4.3", *CLEAN)
def no_minimum(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = safe(log_probs, old_log_probs, mask).exp().clamp(1 - low, 1 + high)
    return -row_means(ratio * advantages[:, None], mask).mean()


@wrong("4.3", *CLEAN)
def high_below_and_low_above(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return -row_means(terms(ratio, advantages[:, None], high, low), mask).mean()


@wrong("4.3", *DIRTY)
def masked_after_the_minimum(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = (log_probs - old_log_probs).exp()
    return -row_means(terms(ratio, advantages[:, None], low, high), mask).mean()


@wrong("4.3", *RARE, *LONE, 0.2, 0.2)
def quotient_of_probabilities(log_probs, old_log_probs, advantages, mask, low, high):
    real = mask.bool()
    new, old = (torch.where(real, x, 0.0).exp() for x in (log_probs, old_log_probs))
    return -row_means(terms(new / old, advantages[:, None], low, high), mask).mean()


@wrong("4.3", *CLEAN)
def advantages_along_the_tokens(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return -row_means(terms(ratio, advantages, low, high), mask).mean()


@wrong("4.3", *CLEAN)
def dual_clip(log_probs, old_log_probs, advantages, mask, low, high):
    ratio, A = safe(log_probs, old_log_probs, mask).exp(), advantages[:, None]
    term = terms(ratio, A, low, high)
    return -row_means(torch.where(A < 0, torch.maximum(term, 3 * A), term), mask).mean()


@wrong("4.3", *CLEAN)
def minimum_of_the_row_means(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    free, held = (row_means(r, mask) for r in (ratio, ratio.clamp(1 - low, 1 + high)))
    return -torch.minimum(free * advantages, held * advantages).mean()


@wrong("4.3", torch.tensor([[-1.0, -1.0]]), torch.tensor([[-16.0, -1.0]]), *LONE, 0.2, 0.2)
def log_ratio_within_ten(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = safe(log_probs, old_log_probs, mask).clamp(-10, 10).exp()
    return -row_means(terms(ratio, advantages[:, None], low, high), mask).mean()


@wrong("4.3", NEW.masked_fill(MASK == 0, 1e4), *CLEAN[1:])
def large_garbage_overflows(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = (log_probs - old_log_probs).nan_to_num(0.0, 0.0, 0.0).exp()
    return -row_means(terms(ratio, advantages[:, None], low, high) * mask, mask).mean()


@wrong("4.3", *CLEAN)
def outside_means_no_gradient(log_probs, old_log_probs, advantages, mask, low, high):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    inside = (ratio >= 1 - low) & (ratio <= 1 + high)
    ratio = torch.where(inside, ratio, ratio.detach())
    return -row_means(terms(ratio, advantages[:, None], low, high), mask).mean()


@right("4.3")
def token_by_token(log_probs, old_log_probs, advantages, mask, low, high):
    def text(i):
        keep, a = mask[i].bool(), advantages[i]
        rho = torch.exp(log_probs[i][keep] - old_log_probs[i][keep])
        return (rho.clamp(max=1 + high) if a > 0 else rho.clamp(min=1 - low)).mean() * a

    return -torch.stack([text(i) for i in range(len(mask))]).mean()


@right("4.3")
def maximum_of_losses(log_probs, old_log_probs, advantages, mask, low, high):
    real = mask > 0.5
    i, t = real.nonzero(as_tuple=True)
    rho = (log_probs[i, t] - old_log_probs[i, t].detach()).exp()
    losses = torch.max(-advantages[i] * rho, -advantages[i] * rho.clip(1 - low, 1 + high))
    return (losses / real.sum(1)[i]).sum() / len(mask)


@right("4.3")
def inputs_filled_first(log_probs, old_log_probs, advantages, mask, low, high):
    hidden, A = mask == 0, advantages.unsqueeze(1)
    rho = (log_probs.masked_fill(hidden, 0.0) - old_log_probs.masked_fill(hidden, 0.0)).exp()
    closed = ((A > 0) & (rho > 1 + high)) | ((A < 0) & (rho < 1 - low))
    used = torch.where(closed, rho.detach().clamp(1 - low, 1 + high), rho)
    return ((-used * A).masked_fill(hidden, 0.0).sum(1) / (~hidden).sum(1)).mean()


# 4.4 ----------------------------------------------------------------------------------------------
REF = OLD + torch.tensor([[0.7, -0.4, 0.2], [0.0, 1.0, -1.0], [3.0, -0.6, 0.5]])
KL = NEW, OLD, REF, MASK
FAR = torch.tensor([[-30.0, -1.0]]), torch.tensor([[-30.5, -1.0]]), torch.tensor([[-2.0, -1.5]])
BOTH = torch.tensor([[1, 1]])


def k3_of(x):
    return x.exp() - x - 1


@wrong("4.4", *KL)
def without_the_ratio(log_probs, old_log_probs, ref_log_probs, mask):
    return k3_of(safe(ref_log_probs, log_probs, mask))


@wrong("4.4", *KL)
def policy_over_reference(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return ratio * k3_of(safe(log_probs, ref_log_probs, mask))


@wrong("4.4", *KL)
def ratio_detached(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp().detach()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask))


@wrong("4.4", *KL)
def k3_detached(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask)).detach()


@wrong("4.4", *KL)
def ratio_always_one(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, log_probs.detach(), mask).exp()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask))


@wrong("4.4", NEW, OLD, REF.masked_fill(MASK == 0, INF), MASK)
def masked_after_the_product(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = (log_probs - old_log_probs).exp()
    return (ratio * k3_of(ref_log_probs - log_probs)).masked_fill(~mask.bool(), 0.0)


@wrong("4.4", *RARE, RARE[0] - 0.3, BOTH)
def k3_of_probabilities(log_probs, old_log_probs, ref_log_probs, mask):
    real = mask.bool()
    new, ref = (torch.where(real, x, 0.0).exp() for x in (log_probs, ref_log_probs))
    return safe(log_probs, old_log_probs, mask).exp() * (ref / new - (ref / new).log() - 1)


@wrong("4.4", *FAR, BOTH)
def reference_ratio_within_e_to_twenty(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask).clamp(-20, 20))


@wrong("4.4", *KL)
def k2_gradient_without_old(log_probs, old_log_probs, ref_log_probs, mask):
    x = safe(ref_log_probs, log_probs, mask)
    ratio = safe(log_probs, old_log_probs, mask).exp().detach()
    return ratio * k3_of(x).detach() + (x.square() - x.square().detach()) / 2


@wrong("4.4", *FAR, BOTH)
def k3_at_most_ten(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask)).clamp(max=10)


@right("4.4")
def known_gradient(log_probs, old_log_probs, ref_log_probs, mask):
    hidden = mask == 0
    new, old, ref = (x.masked_fill(hidden, 0.0) for x in (log_probs, old_log_probs, ref_log_probs))
    x, ratio = (ref - new).detach(), (new - old).detach().exp()
    return ratio * (x.expm1() - x) - ratio * x * (new - new.detach())


@right("4.4")
def scattered_back(log_probs, old_log_probs, ref_log_probs, mask):
    real = mask.bool()
    new, old, ref = log_probs[real], old_log_probs[real].detach(), ref_log_probs[real].detach()
    values = torch.exp(new - old) * (torch.special.expm1(ref - new) + new - ref)
    return torch.zeros_like(log_probs).masked_scatter(real, values)


@right("4.4")
def kept_or_copied(log_probs, old_log_probs, ref_log_probs, mask):
    anchor = log_probs.detach().nan_to_num(0.0, 0.0, 0.0)
    new = torch.where(mask > 0, log_probs, anchor)
    old, ref = (torch.where(mask > 0, x, anchor) for x in (old_log_probs, ref_log_probs))
    d = new - ref
    return (new - old).exp() * ((-d).exp() - 1 + d)


# 4.5 ----------------------------------------------------------------------------------------------
LOGITS = torch.tensor([[0.0, 1.0, 2.0, -1.0], [3.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]])
LOGITS = torch.stack([LOGITS, LOGITS.flip(0) * 2])
BANNED = LOGITS.clone()
BANNED[0, 0, 1] = BANNED[1, 2, 3] = -INF
SEEN = torch.tensor([[1, 1, 1], [0, 0, 1]])


def mean_over(entropy, mask):
    return torch.where(mask.bool(), entropy, 0.0).sum() / mask.sum()


def entropies(logits):
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0.0)).sum(-1)


@wrong("4.5", BANNED, SEEN)
def zero_times_minus_infinity(logits, mask):
    log_p = logits.log_softmax(-1)
    return mean_over(-(log_p.exp() * log_p).sum(-1), mask)


@wrong("4.5", BANNED, SEEN)
def where_around_the_product(logits, mask):
    p, log_p = logits.softmax(-1), logits.log_softmax(-1)
    return mean_over(-torch.where(p > 0, p * log_p, 0.0).sum(-1), mask)


@wrong("4.5", BANNED, SEEN)
def entr_of_softmax(logits, mask):
    return mean_over(torch.special.entr(logits.softmax(-1)).sum(-1), mask)


@wrong("4.5", BANNED, SEEN)
def probabilities_at_least_a_millionth(logits, mask):
    p = logits.softmax(-1).clamp(min=1e-6)
    return mean_over(-(p * p.log()).sum(-1), mask)


@wrong("4.5", LOGITS + 1e4, SEEN)
def exp_without_the_maximum(logits, mask):
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return mean_over(-(p * torch.where(p > 0, p, 1.0).log()).sum(-1), mask)


@wrong("4.5", LOGITS, SEEN)
def rows_before_the_batch(logits, mask):
    return row_means(entropies(logits), mask).mean()


@wrong("4.5", BANNED - 1e5, SEEN)
def forbidden_is_minus_ten_thousand(logits, mask):
    return mean_over(entropies(logits.masked_fill(logits.isneginf(), -1e4)), mask)


@wrong("4.5", LOGITS, SEEN)
def p_under_no_grad(logits, mask):
    with torch.no_grad():
        p = logits.softmax(-1)
    log_p = logits.log_softmax(-1)
    return mean_over(-(p * torch.where(p > 0, log_p, 0.0)).sum(-1), mask)


@wrong("4.5", BANNED, SEEN)
def positions_with_a_forbidden_token_left_out(logits, mask):
    free = mask.bool() & logits.isfinite().all(-1)
    return mean_over(entropies(logits), free)


@wrong("4.5", LOGITS, SEEN)
def over_all_positions(logits, mask):
    return torch.where(mask.bool(), entropies(logits), 0.0).mean()


@right("4.5")
def log_under_no_grad(logits, mask):
    picked = logits[mask.bool()]
    surprise = -picked.detach().log_softmax(-1).nan_to_num(neginf=0.0)
    return (picked.softmax(-1) * surprise).sum() / len(picked)


@right("4.5")
def logsumexp_minus_mean(logits, mask):
    z = logits.clamp(min=-1e9)
    expected = torch.einsum("ntv,ntv->nt", z.softmax(-1), z - z.amax(-1, keepdim=True).detach())
    top = torch.logsumexp(z - z.amax(-1, keepdim=True).detach(), -1)
    return (top - expected)[mask == 1].mean()


@right("4.5")
def position_by_position(logits, mask):
    found = []
    for n, t in mask.nonzero().tolist():
        z = logits[n, t][logits[n, t] > -INF]
        found.append(-F.softmax(z, dim=0) @ F.log_softmax(z, dim=0))
    return sum(found) / len(found)


# 4.6 ----------------------------------------------------------------------------------------------
WHOLE = NEW, OLD, REF, ADVANTAGES, MASK, 0.2, 0.1
ZERO = NEW, OLD, REF, ADVANTAGES, MASK, 0, 0.1
WIDE = NEW, OLD, REF, -ADVANTAGES, MASK, 1.5, 0.1
STILL = NEW, OLD, REF, torch.tensor([1.0, 0.0, -0.5]), MASK, 0.2, 0.1


def parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, low, high):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    kl = k3_of(safe(ref_log_probs, log_probs, mask))
    return ratio, terms(ratio, advantages[:, None], low, high), kl


@wrong("4.6", *WHOLE)
def kl_made_large(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return -row_means(term + kl_weight * kl, mask).mean()


@wrong("4.6", *WHOLE)
def kl_times_ratio(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    rho, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return row_means(kl_weight * rho * kl - term, mask).mean()


@wrong("4.6", *WHOLE)
def kl_over_all_tokens(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return kl_weight * mean_over(kl, mask) - row_means(term, mask).mean()


@wrong("4.6", *ZERO)
def clip_or_default(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    eps = clip or 0.2
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, eps, eps)
    return row_means(kl_weight * kl - term, mask).mean()


@wrong("4.6", *WIDE)
def clip_of_the_log(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    d, A = safe(log_probs, old_log_probs, mask), advantages[:, None]
    held = d.clamp(math.log(1 - clip), math.log(1 + clip))
    kl = k3_of(safe(ref_log_probs, log_probs, mask))
    return row_means(kl_weight * kl - torch.minimum(d.exp() * A, held.exp() * A), mask).mean()


@wrong("4.6", *WHOLE)
def kl_as_a_number(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return row_means(kl_weight * kl.detach() - term, mask).mean()


@wrong("4.6", *WIDE)
def clip_at_most_one(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    eps = min(clip, 1.0)
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, eps, eps)
    return row_means(kl_weight * kl - term, mask).mean()


@wrong("4.6", *STILL)
def rows_without_advantage_skipped(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    loss = row_means(kl_weight * kl - term, mask)
    return torch.where(advantages == 0, 0.0, loss).mean()


@wrong("4.6", *WHOLE)
def kl_of_the_old_policy(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    _, term, _ = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return row_means(
        kl_weight * k3_of(safe(ref_log_probs, old_log_probs, mask)) - term, mask
    ).mean()


@wrong("4.6", *WHOLE)
def kl_inside_the_minimum(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    rho, _, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    A = advantages[:, None]
    inner = torch.minimum(rho * A - kl_weight * kl, rho.clamp(1 - clip, 1 + clip) * A)
    return -row_means(inner, mask).mean()


@right("4.6")
def one_text_after_the_other(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    total = 0.0
    for new, old, ref, a, keep in zip(
        log_probs, old_log_probs, ref_log_probs, advantages, mask.bool()
    ):
        rho, x = (new - old)[keep].exp(), (ref - new)[keep]
        push = torch.min(rho * a, rho.clamp(1 - clip, 1 + clip) * a)
        total = total + (kl_weight * (x.expm1() - x) - push).mean()
    return total / len(mask)


@right("4.6")
def only_the_policy_filled(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    new = log_probs.masked_fill(mask == 0, 0.0)
    rho, x, A = (new - old_log_probs).exp(), ref_log_probs - new, advantages.view(-1, 1)
    push = torch.where(A >= 0, rho.clamp(max=1 + clip), rho.clamp(min=1 - clip)) * A
    loss = kl_weight * (x.exp() - x - 1) - push
    return (loss.masked_fill(mask == 0, 0.0).sum(1) / mask.sum(1)).mean()


@right("4.6")
def two_averages(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    n, t = mask.nonzero(as_tuple=True)
    new, A = log_probs[n, t], advantages[n]
    d, x = new - old_log_probs[n, t], ref_log_probs[n, t] - new
    worst = F.relu(d.exp() - (1 + clip)) * A.clamp(min=0)
    worst = worst + F.relu(1 - clip - d.exp()) * (-A).clamp(min=0)
    weight = 1 / (mask.sum(dim=1)[n] * len(mask))
    return (weight * kl_weight * (x.exp() - 1 - x)).sum() - (weight * (d.exp() * A - worst)).sum()
