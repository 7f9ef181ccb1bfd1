"""Answers to the exercise of the appendix."""

import numpy as np
import torch
from attack import right, wrong
from torch.nn.functional import pad

R = torch.tensor([[0.0, 0.5, 1.0], [1.0, 2.0, 7.0]])
V = torch.tensor([[0.5, 0.25, 0.75], [0.5, 1.0, 3.0]])
WITNESS = R, V, torch.tensor([[1, 1, 1], [1, 1, 0]]), 0.5, 0.8


def surprises(rewards, values, mask, gamma):
    r, v = (torch.where(mask.bool(), table, 0.0) for table in (rewards, values))
    return r + gamma * pad(v[:, 1:], (0, 1)) - v


def faded(delta, by):
    return sum(by**k * pad(delta[:, k:], (0, k)) for k in range(delta.shape[1]))


@right("A.1")
def row_by_row(rewards, values, mask, lam, gamma=1.0):
    out = torch.zeros_like(values)
    for n, length in enumerate(mask.sum(dim=1).int().tolist()):
        after = carried = 0.0
        for t in range(length - 1, -1, -1):
            carried = rewards[n, t] + gamma * after - values[n, t] + gamma * lam * carried
            after, out[n, t] = values[n, t], carried
    return out


@right("A.1")
def cumulative_from_the_back(rewards, values, mask, lam, gamma=1.0):
    delta, by = surprises(rewards, values, mask, gamma), gamma * lam
    powers = by ** torch.arange(delta.shape[1]) if by else torch.ones(1)
    return ((delta * powers).flip(1).cumsum(1).flip(1) / powers) if by else delta


@right("A.1")
def in_place_in_numpy(rewards, values, mask, lam, gamma=1.0):
    A = surprises(rewards, values, mask, gamma).numpy()
    for t in range(A.shape[1] - 2, -1, -1):
        A[:, t] += np.float32(gamma * lam) * A[:, t + 1]
    return torch.from_numpy(A)


@right("A.1")
def with_going_for_not_done(rewards, values, mask, lam, gamma=1.0):
    r, v = rewards.where(mask > 0, 0), values.where(mask > 0, 0)
    going, columns, last = pad(mask[:, 1:], (0, 1)), [], 0.0
    for t in reversed(range(mask.shape[1])):
        after = v[:, t + 1] if t + 1 < mask.shape[1] else 0.0
        delta = r[:, t] + gamma * after * going[:, t] - v[:, t]
        last = delta + gamma * lam * going[:, t] * last
        columns.insert(0, last)
    return torch.stack(columns, dim=1)


@wrong("A.1", *WITNESS)
def the_returns(rewards, values, mask, lam, gamma=1.0):
    return faded(surprises(rewards, values, mask, gamma), gamma * lam) + values * mask


@wrong("A.1", *WITNESS)
def only_lambda_fades(rewards, values, mask, lam, gamma=1.0):
    return faded(surprises(rewards, values, mask, gamma), lam)


@wrong("A.1", *WITNESS)
def the_last_value_for_what_comes_after(rewards, values, mask, lam, gamma=1.0):
    r, v = rewards * mask, values * mask
    return faded(r + gamma * torch.cat([v[:, 1:], v[:, -1:]], dim=1) - v, gamma * lam) * mask


@wrong("A.1", *WITNESS)
def the_mask_at_the_end_only(rewards, values, mask, lam, gamma=1.0):
    return faded(surprises(rewards, values, torch.ones_like(mask), gamma), gamma * lam) * mask
