"""Answers to the exercises of notebook 10."""

import torch
from attack import right, wrong

MASK = torch.tensor([[0, 1, 1], [1, 0, 0]])
LOSSES = torch.tensor([[1.0, 2.0, -3.0], [0.5, 7.0, 4.0]], dtype=torch.double)


@right("10.3")
def over_the_mean_number(per_token, mask, tokens_per_rank):
    return per_token.masked_fill(mask == 0, 0).sum() / tokens_per_rank.double().mean()


REWARDS = torch.tensor([[1.0, 0, 0.5], [2, -1, 0], [3, 3, 1], [0, 0.25, 4]]).double()


def z_scores(groups, eps=1e-4):
    return (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + eps)


@wrong("10.4", REWARDS, 4, 1)
def group_ends_forgotten(rewards_per_rank, group_size, rank):
    n, flat = rewards_per_rank.shape[1], rewards_per_rank.flatten()
    first = rank * n // group_size * group_size
    groups = flat[first:][: -(-n // group_size) * group_size].view(-1, group_size)
    return z_scores(groups).flatten()[rank * n - first :][:n]


TRAINER = torch.tensor([[-1.0, -0.2, -3.0], [-0.5, -2.0, -1.0]]).double()
SAMPLER = torch.tensor([[-1.2, -0.7, -1.0], [-2.5, -2.0, -1.5]]).double()
RARE = LOSSES, TRAINER - 30, SAMPLER - 30, MASK, 3.0


@wrong("10.1", *RARE)
def eps_below_the_fraction(per_token, log_probs, sampler_log_probs, mask, cap):
    real = mask.bool()
    ratio = log_probs[real].exp() / (sampler_log_probs[real].exp() + 1e-10)
    return (ratio.clamp(max=cap).detach() * per_token[real]).mean()


@right("10.1")
def zeros_before_all(per_token, log_probs, sampler_log_probs, mask, cap):
    loss, new, old = (
        x.masked_fill(mask == 0, 0) for x in (per_token, log_probs, sampler_log_probs)
    )
    with torch.no_grad():
        weights = torch.exp(new - old).clamp_max(cap)
    return (weights * loss).sum() / mask.count_nonzero()


@right("10.2")
def ratio_after_ratio(log_probs, sampler_log_probs, mask, cap):
    out = []
    with torch.no_grad():
        for new, old, real in zip(log_probs, sampler_log_probs, mask.bool()):
            product = (new[real] - old[real]).exp().prod()
            out.append(product if product <= cap else torch.zeros_like(product))
    return torch.stack(out)
