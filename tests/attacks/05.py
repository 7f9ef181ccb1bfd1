"""Answers to the exercises of notebook 05."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from attack import right, wrong

NAN, INF = math.nan, math.inf

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


# 5.1 ----------------------------------------------------------------------------------------------
REF = OLD + torch.tensor([[0.7, -0.4, 0.2], [0.0, 1.0, -1.0], [3.0, -0.6, 0.5]])
KL = NEW, OLD, REF, MASK
FAR = torch.tensor([[-30.0, -1.0]]), torch.tensor([[-30.5, -1.0]]), torch.tensor([[-2.0, -1.5]])
BOTH = torch.tensor([[1, 1]])


def k3_of(x):
    return x.exp() - x - 1


@wrong("5.1", *KL)
def without_the_ratio(log_probs, old_log_probs, ref_log_probs, mask):
    return k3_of(safe(ref_log_probs, log_probs, mask))


@wrong("5.1", *KL)
def policy_over_reference(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return ratio * k3_of(safe(log_probs, ref_log_probs, mask))


@wrong("5.1", *KL)
def ratio_detached(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp().detach()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask))


@wrong("5.1", *KL)
def k3_detached(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask)).detach()


@wrong("5.1", *KL)
def ratio_always_one(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, log_probs.detach(), mask).exp()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask))


@wrong("5.1", NEW, OLD, REF.masked_fill(MASK == 0, INF), MASK)
def masked_after_the_product(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = (log_probs - old_log_probs).exp()
    return (ratio * k3_of(ref_log_probs - log_probs)).masked_fill(~mask.bool(), 0.0)


@wrong("5.1", *RARE, RARE[0] - 0.3, BOTH)
def k3_of_probabilities(log_probs, old_log_probs, ref_log_probs, mask):
    real = mask.bool()
    new, ref = (torch.where(real, x, 0.0).exp() for x in (log_probs, ref_log_probs))
    return safe(log_probs, old_log_probs, mask).exp() * (ref / new - (ref / new).log() - 1)


@wrong("5.1", *FAR, BOTH)
def reference_ratio_within_e_to_twenty(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask).clamp(-20, 20))


@wrong("5.1", *KL)
def k2_gradient_without_old(log_probs, old_log_probs, ref_log_probs, mask):
    x = safe(ref_log_probs, log_probs, mask)
    ratio = safe(log_probs, old_log_probs, mask).exp().detach()
    return ratio * k3_of(x).detach() + (x.square() - x.square().detach()) / 2


@wrong("5.1", *FAR, BOTH)
def k3_at_most_ten(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask)).clamp(max=10)


@right("5.1")
def known_gradient(log_probs, old_log_probs, ref_log_probs, mask):
    hidden = mask == 0
    new, old, ref = (x.masked_fill(hidden, 0.0) for x in (log_probs, old_log_probs, ref_log_probs))
    x, ratio = (ref - new).detach(), (new - old).detach().exp()
    return ratio * (x.expm1() - x) - ratio * x * (new - new.detach())


@right("5.1")
def scattered_back(log_probs, old_log_probs, ref_log_probs, mask):
    real = mask.bool()
    new, old, ref = log_probs[real], old_log_probs[real].detach(), ref_log_probs[real].detach()
    values = torch.exp(new - old) * (torch.special.expm1(ref - new) + new - ref)
    return torch.zeros_like(log_probs).masked_scatter(real, values)


@right("5.1")
def kept_or_copied(log_probs, old_log_probs, ref_log_probs, mask):
    anchor = log_probs.detach().nan_to_num(0.0, 0.0, 0.0)
    new = torch.where(mask > 0, log_probs, anchor)
    old, ref = (torch.where(mask > 0, x, anchor) for x in (old_log_probs, ref_log_probs))
    d = new - ref
    return (new - old).exp() * ((-d).exp() - 1 + d)


# 5.2 ----------------------------------------------------------------------------------------------
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


@wrong("5.2", BANNED, SEEN)
def zero_times_minus_infinity(logits, mask):
    log_p = logits.log_softmax(-1)
    return mean_over(-(log_p.exp() * log_p).sum(-1), mask)


@wrong("5.2", BANNED, SEEN)
def where_around_the_product(logits, mask):
    p, log_p = logits.softmax(-1), logits.log_softmax(-1)
    return mean_over(-torch.where(p > 0, p * log_p, 0.0).sum(-1), mask)


@wrong("5.2", BANNED, SEEN)
def entr_of_softmax(logits, mask):
    return mean_over(torch.special.entr(logits.softmax(-1)).sum(-1), mask)


@wrong("5.2", BANNED, SEEN)
def probabilities_at_least_a_millionth(logits, mask):
    p = logits.softmax(-1).clamp(min=1e-6)
    return mean_over(-(p * p.log()).sum(-1), mask)


@wrong("5.2", LOGITS + 1e4, SEEN)
def exp_without_the_maximum(logits, mask):
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return mean_over(-(p * torch.where(p > 0, p, 1.0).log()).sum(-1), mask)


@wrong("5.2", LOGITS, SEEN)
def rows_before_the_batch(logits, mask):
    return row_means(entropies(logits), mask).mean()


@wrong("5.2", BANNED - 1e5, SEEN)
def forbidden_is_minus_ten_thousand(logits, mask):
    return mean_over(entropies(logits.masked_fill(logits.isneginf(), -1e4)), mask)


@wrong("5.2", LOGITS, SEEN)
def p_under_no_grad(logits, mask):
    with torch.no_grad():
        p = logits.softmax(-1)
    log_p = logits.log_softmax(-1)
    return mean_over(-(p * torch.where(p > 0, log_p, 0.0)).sum(-1), mask)


@wrong("5.2", BANNED, SEEN)
def positions_with_a_forbidden_token_left_out(logits, mask):
    free = mask.bool() & logits.isfinite().all(-1)
    return mean_over(entropies(logits), free)


@wrong("5.2", LOGITS, SEEN)
def over_all_positions(logits, mask):
    return torch.where(mask.bool(), entropies(logits), 0.0).mean()


@right("5.2")
def log_under_no_grad(logits, mask):
    picked = logits[mask.bool()]
    surprise = -picked.detach().log_softmax(-1).nan_to_num(neginf=0.0)
    return (picked.softmax(-1) * surprise).sum() / len(picked)


@right("5.2")
def logsumexp_minus_mean(logits, mask):
    z = logits.clamp(min=-1e9)
    expected = torch.einsum("ntv,ntv->nt", z.softmax(-1), z - z.amax(-1, keepdim=True).detach())
    top = torch.logsumexp(z - z.amax(-1, keepdim=True).detach(), -1)
    return (top - expected)[mask == 1].mean()


@right("5.2")
def position_by_position(logits, mask):
    found = []
    for n, t in mask.nonzero().tolist():
        z = logits[n, t][logits[n, t] > -INF]
        found.append(-F.softmax(z, dim=0) @ F.log_softmax(z, dim=0))
    return sum(found) / len(found)


# 5.3 ----------------------------------------------------------------------------------------------
WHOLE = NEW, OLD, REF, ADVANTAGES, MASK, 0.2, 0.1
ZERO = NEW, OLD, REF, ADVANTAGES, MASK, 0, 0.1
WIDE = NEW, OLD, REF, -ADVANTAGES, MASK, 1.5, 0.1
STILL = NEW, OLD, REF, torch.tensor([1.0, 0.0, -0.5]), MASK, 0.2, 0.1


def parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, low, high):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    kl = k3_of(safe(ref_log_probs, log_probs, mask))
    return ratio, terms(ratio, advantages[:, None], low, high), kl


@wrong("5.3", *WHOLE)
def kl_made_large(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return -row_means(term + kl_weight * kl, mask).mean()


@wrong("5.3", *WHOLE)
def kl_times_ratio(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    rho, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return row_means(kl_weight * rho * kl - term, mask).mean()


@wrong("5.3", *WHOLE)
def kl_over_all_tokens(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return kl_weight * mean_over(kl, mask) - row_means(term, mask).mean()


@wrong("5.3", *ZERO)
def clip_or_default(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    eps = clip or 0.2
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, eps, eps)
    return row_means(kl_weight * kl - term, mask).mean()


@wrong("5.3", *WIDE)
def clip_of_the_log(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    d, A = safe(log_probs, old_log_probs, mask), advantages[:, None]
    held = d.clamp(math.log(1 - clip), math.log(1 + clip))
    kl = k3_of(safe(ref_log_probs, log_probs, mask))
    return row_means(kl_weight * kl - torch.minimum(d.exp() * A, held.exp() * A), mask).mean()


@wrong("5.3", *WHOLE)
def kl_as_a_number(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return row_means(kl_weight * kl.detach() - term, mask).mean()


@wrong("5.3", *WIDE)
def clip_at_most_one(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    eps = min(clip, 1.0)
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, eps, eps)
    return row_means(kl_weight * kl - term, mask).mean()


@wrong("5.3", *STILL)
def rows_without_advantage_skipped(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    _, term, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    loss = row_means(kl_weight * kl - term, mask)
    return torch.where(advantages == 0, 0.0, loss).mean()


@wrong("5.3", *WHOLE)
def kl_of_the_old_policy(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    _, term, _ = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    return row_means(
        kl_weight * k3_of(safe(ref_log_probs, old_log_probs, mask)) - term, mask
    ).mean()


@wrong("5.3", *WHOLE)
def kl_inside_the_minimum(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    rho, _, kl = parts(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, clip)
    A = advantages[:, None]
    inner = torch.minimum(rho * A - kl_weight * kl, rho.clamp(1 - clip, 1 + clip) * A)
    return -row_means(inner, mask).mean()


@right("5.3")
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


@right("5.3")
def only_the_policy_filled(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight
):
    new = log_probs.masked_fill(mask == 0, 0.0)
    rho, x, A = (new - old_log_probs).exp(), ref_log_probs - new, advantages.view(-1, 1)
    push = torch.where(A >= 0, rho.clamp(max=1 + clip), rho.clamp(min=1 - clip)) * A
    loss = kl_weight * (x.exp() - x - 1) - push
    return (loss.masked_fill(mask == 0, 0.0).sum(1) / mask.sum(1)).mean()


@right("5.3")
def two_averages(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    n, t = mask.nonzero(as_tuple=True)
    new, A = log_probs[n, t], advantages[n]
    d, x = new - old_log_probs[n, t], ref_log_probs[n, t] - new
    worst = F.relu(d.exp() - (1 + clip)) * A.clamp(min=0)
    worst = worst + F.relu(1 - clip - d.exp()) * (-A).clamp(min=0)
    weight = 1 / (mask.sum(dim=1)[n] * len(mask))
    return (weight * kl_weight * (x.exp() - 1 - x)).sum() - (weight * (d.exp() * A - worst)).sum()
