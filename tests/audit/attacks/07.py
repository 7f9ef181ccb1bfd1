"""Answers to the exercises of notebook 07."""

import torch
import torch.nn.functional as F
from attack import right, wrong

LONE = torch.tensor([0.25]), torch.tensor([0.1, 0.9])


@wrong("7.1", *LONE)
def squeezed(stop, rewards):
    p = stop.squeeze()
    here = torch.cat([p.new_ones(1), (1 - p).cumprod(-1)])
    return (here * F.pad(p, (0, 1), value=1.0) * rewards).sum()


@right("7.1")
def by_recursion(stop, rewards):
    if len(stop) == 0:
        return rewards[0]
    return stop[0] * rewards[0] + (1 - stop[0]) * by_recursion(stop[1:], rewards[1:])


PROBS = torch.tensor([[0.9, 0.2, 0.5], [0.6, 0.99, 0.05]])
THREE = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
CALM = PROBS, torch.tensor([0.0, 1.0]), THREE


@wrong("7.2", *CALM)
def calm_rows_do_not_count(probs, advantages, mask):
    real = mask.bool() & (advantages != 0)[:, None]
    return torch.where(real, (1 - probs) * advantages[:, None], 0.0) / real.sum()
