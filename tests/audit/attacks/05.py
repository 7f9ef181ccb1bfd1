"""Answers to the exercises of notebook 05."""

import torch
from attack import right, wrong

OLD = torch.tensor([[-1.0, -2.0, -3.0], [-1.5, -1.0, -2.0], [-4.0, -3.0, -2.0]])
NEW = OLD + torch.tensor([[-0.6, 0.1, 0.5], [-0.6, 0.0, 0.4], [1.6, -0.3, 0.2]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0]])


def terms(ratio, A, low, high):
    return torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


def row_means(table, mask):
    return torch.where(mask.bool(), table, 0.0).sum(-1) / mask.sum(-1)


def safe(new, old, mask):
    return torch.where(mask.bool(), new - old, 0.0)


REF = OLD + torch.tensor([[0.7, -0.4, 0.2], [0.0, 1.0, -1.0], [3.0, -0.6, 0.5]])
FAR = torch.tensor([[-30.0, -1.0]]), torch.tensor([[-30.5, -1.0]]), torch.tensor([[-2.0, -1.5]])
BOTH = torch.tensor([[1, 1]])


def k3_of(x):
    return x.exp() - x - 1


@wrong("5.1", *FAR, BOTH)
def reference_ratio_within_e_to_twenty(log_probs, old_log_probs, ref_log_probs, mask):
    ratio = safe(log_probs, old_log_probs, mask).exp()
    return ratio * k3_of(safe(ref_log_probs, log_probs, mask).clamp(-20, 20))


@right("5.1")
def known_gradient(log_probs, old_log_probs, ref_log_probs, mask):
    hidden = mask == 0
    new, old, ref = (x.masked_fill(hidden, 0.0) for x in (log_probs, old_log_probs, ref_log_probs))
    x, ratio = (ref - new).detach(), (new - old).detach().exp()
    return ratio * (x.expm1() - x) - ratio * x * (new - new.detach())


@right("5.2")
def log_under_no_grad(logits, mask):
    picked = logits[mask.bool()]
    surprise = -picked.detach().log_softmax(-1).nan_to_num(neginf=0.0)
    return (picked.softmax(-1) * surprise).sum() / len(picked)


HESITATION = torch.tensor(1.1)
FIRST = NEW, OLD, REF, HESITATION
STILL = *FIRST, torch.tensor([1.0, 0.0, -0.5]), MASK, 0.2, 0.1, 0.05


@wrong("5.3", *STILL)
def rows_without_advantage_skipped(new, old, ref, entropy, A, mask, clip, beta, alpha):
    ratio = safe(new, old, mask).exp()
    kl = ratio * k3_of(safe(ref, new, mask))
    loss = row_means(beta * kl - terms(ratio, A[:, None], clip, clip), mask)
    return torch.where(A == 0, 0.0, loss).mean() - alpha * entropy


@right("5.3")
def one_text_after_the_other(new, old, ref, entropy, A, mask, clip, beta, alpha):
    total = 0.0
    for n, o, r, a, keep in zip(new, old, ref, A, mask.bool()):
        rho, x = (n - o)[keep].exp(), (r - n)[keep]
        push = torch.min(rho * a, rho.clamp(1 - clip, 1 + clip) * a)
        total = total + (beta * rho * (x.expm1() - x) - push).mean()
    return total / len(mask) - alpha * entropy
