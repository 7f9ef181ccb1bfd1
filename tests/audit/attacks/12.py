"""Answers to the exercises of notebook 12."""

from __future__ import annotations

import torch
from attack import right, wrong


@wrong("12.1", [10, 7], [[(3, 3)], [(4, 3)]])
def only_the_first_row(lengths, replies):
    own = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    for start, length in replies[0]:
        own[0, start : start + length] = False
    return own


@right("12.2")
def of_own_tokens_alone(log_probs, old_log_probs, advantages, own, clip):
    rows, places = own.bool().nonzero(as_tuple=True)
    ratio = (log_probs[rows, places] - old_log_probs[rows, places]).exp()
    A = advantages[rows]
    return -torch.minimum(ratio * A, ratio.clamp(1 - clip[0], 1 + clip[1]) * A).mean()


SOME = torch.tensor([[-1.0, -0.1, -0.5]]), torch.tensor([[-1.2, 0.0, -0.6]])


@wrong("12.2", *SOME, torch.tensor([1.0]), torch.tensor([[True, False, True]]), (0.2, 0.2))
def zeros_for_the_tool(log_probs, old_log_probs, advantages, own, clip):
    ratio = (log_probs * own - old_log_probs).exp()
    A = advantages[:, None]
    return -torch.minimum(ratio * A, ratio.clamp(1 - clip[0], 1 + clip[1]) * A).mean()


@wrong("12.3", 16, 3)
def adding_up(n, k):
    return min(n, 2 * k) / n


@wrong("12.4", torch.tensor([[0.5, 1.0], [0.25, 0.0]]), torch.tensor([[True, True], [True, False]]))
def the_answer_alone(earned, played):
    last = earned.gather(1, played.sum(dim=1, keepdim=True) - 1)
    return (last - last.mean()) * played


@wrong("12.5", torch.tensor([16, 21, 17]), torch.tensor([True, True, True]))
def after_a_tag_alone(ids, own):
    forged = own & ((ids == 16) | (ids == 17)) & (ids.roll(1) == 21)
    return ids.masked_fill(forged, 18)
