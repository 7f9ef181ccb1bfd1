"""Answers to the exercises of notebook 12."""

import torch
from attack import right, wrong


@right("12.2")
def of_own_tokens_alone(log_probs, old_log_probs, advantages, own, clip):
    rows, places = own.bool().nonzero(as_tuple=True)
    ratio = (log_probs[rows, places] - old_log_probs[rows, places]).exp()
    A = advantages[rows]
    return -torch.minimum(ratio * A, ratio.clamp(1 - clip[0], 1 + clip[1]) * A).mean()


@wrong("12.3", 16, 3)
def adding_up(n, k):
    return min(n, 2 * k) / n


@wrong("12.5", torch.tensor([16, 21, 17]), torch.tensor([True, True, True]))
def after_a_tag_alone(ids, own):
    forged = own & ((ids == 16) | (ids == 17)) & (ids.roll(1) == 21)
    return ids.masked_fill(forged, 18)
