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
MANY = torch.cat([LOGITS, torch.full((2, 3, 1000), -INF)], dim=-1)


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


@wrong("5.2", MANY, SEEN)
def probabilities_at_least_a_millionth(logits, mask):
    p = logits.softmax(-1).clamp(min=1e-6)
    return mean_over(-(p * p.log()).sum(-1), mask)


@wrong("5.2", LOGITS, SEEN)
def rows_before_the_batch(logits, mask):
    return row_means(entropies(logits), mask).mean()


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
HESITATION = torch.tensor([[0.3, 2.0, 1.1], [0.0, 0.9, 1.7], [2.5, 0.4, 0.6]])
FIRST = NEW, OLD, REF, HESITATION
WHOLE = *FIRST, ADVANTAGES, MASK, 0.2, 0.1, 0.05
ZERO = *FIRST, ADVANTAGES, MASK, 0, 0.1, 0.05
WIDE = *FIRST, -ADVANTAGES, MASK, 1.5, 0.1, 0.05
STILL = *FIRST, torch.tensor([1.0, 0.0, -0.5]), MASK, 0.2, 0.1, 0.05
ALONE = *FIRST, ADVANTAGES, MASK, 0.2, 0.0, 0.5


def parts(new, old, ref, H, A, mask, low, high):
    ratio = safe(new, old, mask).exp()
    return (
        ratio,
        terms(ratio, A[:, None], low, high),
        k3_of(safe(ref, new, mask)),
        mean_over(H, mask),
    )


@wrong("5.3", *WHOLE)
def kl_made_large(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, kl, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    return -row_means(term + beta * kl, mask).mean() - alpha * bonus


@wrong("5.3", *WHOLE)
def kl_times_ratio(new, old, ref, H, A, mask, clip, beta, alpha):
    rho, term, kl, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    return row_means(beta * rho * kl - term, mask).mean() - alpha * bonus


@wrong("5.3", *WHOLE)
def kl_over_all_tokens(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, kl, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    return beta * mean_over(kl, mask) - row_means(term, mask).mean() - alpha * bonus


@wrong("5.3", *ZERO)
def clip_or_default(new, old, ref, H, A, mask, clip, beta, alpha):
    eps = clip or 0.2
    _, term, kl, bonus = parts(new, old, ref, H, A, mask, eps, eps)
    return row_means(beta * kl - term, mask).mean() - alpha * bonus


@wrong("5.3", *WIDE)
def clip_of_the_log(new, old, ref, H, A, mask, clip, beta, alpha):
    d, a = safe(new, old, mask), A[:, None]
    held = d.clamp(math.log(1 - clip), math.log(1 + clip))
    loss = beta * k3_of(safe(ref, new, mask)) - torch.minimum(d.exp() * a, held.exp() * a)
    return row_means(loss, mask).mean() - alpha * mean_over(H, mask)


@wrong("5.3", *WHOLE)
def kl_as_a_number(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, kl, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    return row_means(beta * kl.detach() - term, mask).mean() - alpha * bonus


@wrong("5.3", *WIDE)
def clip_at_most_one(new, old, ref, H, A, mask, clip, beta, alpha):
    eps = min(clip, 1.0)
    _, term, kl, bonus = parts(new, old, ref, H, A, mask, eps, eps)
    return row_means(beta * kl - term, mask).mean() - alpha * bonus


@wrong("5.3", *STILL)
def rows_without_advantage_skipped(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, kl, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    loss = row_means(beta * kl - term, mask)
    return torch.where(A == 0, 0.0, loss).mean() - alpha * bonus


@wrong("5.3", *WHOLE)
def kl_of_the_old_policy(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, _, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    return row_means(beta * k3_of(safe(ref, old, mask)) - term, mask).mean() - alpha * bonus


@wrong("5.3", *WHOLE)
def kl_inside_the_minimum(new, old, ref, H, A, mask, clip, beta, alpha):
    rho, _, kl, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    a = A[:, None]
    inner = torch.minimum(rho * a - beta * kl, rho.clamp(1 - clip, 1 + clip) * a)
    return -row_means(inner, mask).mean() - alpha * bonus


@wrong("5.3", *WHOLE)
def hesitation_is_punished(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, kl, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    return row_means(beta * kl - term, mask).mean() + alpha * bonus


@wrong("5.3", *WHOLE)
def three_terms_in_one_average(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, kl, _ = parts(new, old, ref, H, A, mask, clip, clip)
    return row_means(beta * kl - term - alpha * H, mask).mean()


@wrong("5.3", *WHOLE)
def three_terms_over_all_tokens(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, kl, _ = parts(new, old, ref, H, A, mask, clip, clip)
    return mean_over(beta * kl - term - alpha * H, mask)


@wrong("5.3", *WHOLE)
def entropy_as_a_number(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, kl, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    return row_means(beta * kl - term, mask).mean() - alpha * bonus.item()


@wrong("5.3", *ALONE)
def one_weight_switches_both(new, old, ref, H, A, mask, clip, beta, alpha):
    _, term, kl, bonus = parts(new, old, ref, H, A, mask, clip, clip)
    loss = -row_means(term, mask).mean()
    return loss + beta * row_means(kl, mask).mean() - alpha * bonus if beta else loss


@wrong("5.3", *WHOLE)
def entropy_of_the_clipped_tokens_left_out(new, old, ref, H, A, mask, clip, beta, alpha):
    rho, term, kl, _ = parts(new, old, ref, H, A, mask, clip, clip)
    held = torch.where((rho - 1).abs() > clip, 0.0, H)
    return row_means(beta * kl - term, mask).mean() - alpha * mean_over(held, mask)


@right("5.3")
def one_text_after_the_other(new, old, ref, H, A, mask, clip, beta, alpha):
    total, entropies, tokens = 0.0, 0.0, 0
    for n, o, r, h, a, keep in zip(new, old, ref, H, A, mask.bool()):
        rho, x = (n - o)[keep].exp(), (r - n)[keep]
        push = torch.min(rho * a, rho.clamp(1 - clip, 1 + clip) * a)
        total = total + (beta * (x.expm1() - x) - push).mean()
        entropies, tokens = entropies + h[keep].sum(), tokens + len(x)
    return total / len(mask) - alpha / tokens * entropies


@right("5.3")
def only_the_policy_filled(new, old, ref, H, A, mask, clip, beta, alpha):
    hidden, a = mask == 0, A.view(-1, 1)
    filled = new.masked_fill(hidden, 0.0)
    rho, x = (filled - old).exp(), ref - filled
    push = torch.where(a >= 0, rho.clamp(max=1 + clip), rho.clamp(min=1 - clip)) * a
    loss = (beta * (x.exp() - x - 1) - push).masked_fill(hidden, 0.0)
    bonus = alpha * H.masked_fill(hidden, 0.0) / (~hidden).sum()
    return (loss.sum(1) / mask.sum(1)).mean() - bonus.sum()


@right("5.3")
def one_sum_of_weighted_tokens(new, old, ref, H, A, mask, clip, beta, alpha):
    n, t = mask.nonzero(as_tuple=True)
    policy, a = new[n, t], A[n]
    d, x = policy - old[n, t], ref[n, t] - policy
    worst = F.relu(d.exp() - (1 + clip)) * a.clamp(min=0)
    worst = worst + F.relu(1 - clip - d.exp()) * (-a).clamp(min=0)
    weight = 1 / (mask.sum(dim=1)[n] * len(mask))
    loss = weight * (beta * (x.exp() - 1 - x) - (d.exp() * a - worst))
    return (loss - alpha * H[n, t] / len(n)).sum()
