"""Answers to the exercises of notebook 12."""

from __future__ import annotations

import torch
from attack import right, wrong


@right("12.1")
def token_by_token(lengths, replies):
    T = max(lengths)
    rows = []
    for length, spans in zip(lengths, replies):
        told = {t for start, n in spans for t in range(start, start + n)}
        rows.append([t < length and t not in told for t in range(T)])
    return torch.tensor(rows)


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


@right("12.3")
def in_the_middle(n, k):
    if n == 1 or k == 0:
        return 1 / n
    t = n // 2
    return (t * in_the_middle(t, k - 1) + (n - t) * in_the_middle(n - t, k - 1)) / n


@wrong("12.3", 16, 3)
def adding_up(n, k):
    return min(n, 2 * k) / n


@right("12.4")
def turn_by_turn(earned, played):
    A = torch.zeros(earned.shape)
    for k in range(earned.shape[1]):
        had = played[:, k]
        if had.any():
            ahead = earned[had, k:].sum(dim=1)
            A[had, k] = ahead - ahead.mean()
    return A


@wrong("12.4", torch.tensor([[0.5, 1.0], [0.25, 0.0]]), torch.tensor([[True, True], [True, False]]))
def the_answer_alone(earned, played):
    last = earned.gather(1, played.sum(dim=1, keepdim=True) - 1)
    return (last - last.mean()) * played


@right("12.5")
def one_by_one(ids, own):
    words = [18 if i in (16, 17) and mine else i for i, mine in zip(ids.tolist(), own.tolist())]
    return torch.tensor(words)


@wrong("12.5", torch.tensor([16, 21, 17]), torch.tensor([True, True, True]))
def after_a_tag_alone(ids, own):
    forged = own & ((ids == 16) | (ids == 17)) & (ids.roll(1) == 21)
    return ids.masked_fill(forged, 18)
