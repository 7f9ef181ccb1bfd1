"""Answers to the exercises of notebook 03."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from attack import right, wrong

NAN, INF = math.nan, math.inf


def floats(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


IDS = torch.tensor([[4, 1, 4, 2], [0, 4, 3, 4], [1, 2, 4, 4]])
HOLES = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0]])
NEW = floats([-1.0, -2.0, -0.5], [-0.3, NAN, -1.5], [INF, -1.2, 0.0])
OLD = floats([-1.5, -1.0, -0.7], [-0.2, -1.0, -1.1], [-1.0, NAN, -0.4])
OLD_CLEAN = floats([-1.5, -1.0, -0.7], [-0.2, -INF, -1.1], [-1.0, -1.0, -0.4])
REAL = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1]])
TIGHT = NEW, OLD_CLEAN, floats(1.0, -0.5, 2.0), torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1]]), 0.2


@wrong("3.1", IDS, HOLES, 4)
def share_of_the_first_tokens(completions, mask, letter_id):
    lengths = mask.sum(dim=-1).long().tolist()
    shares = [(row[:n] == letter_id).float().mean() for row, n in zip(completions, lengths)]
    return torch.stack(shares)


@wrong("3.1", torch.arange(600)[None], torch.ones(1, 600), 4)
def share_rounded_as_printed(completions, mask, letter_id):
    hits = ((completions == letter_id) * mask).sum(dim=-1)
    return torch.round(hits / mask.sum(dim=-1), decimals=4)


@wrong("3.1", IDS + 128250, torch.ones(3, 4), 128254)
def ids_only_close(completions, mask, letter_id):
    hits = torch.isclose(completions.double(), torch.tensor(float(letter_id)).double())
    return (hits & mask.bool()).sum(dim=-1) / mask.bool().sum(dim=-1)


@right("3.1")
def share_row_by_row(completions, mask, letter_id):
    shares = []
    for ids, real in zip(completions.tolist(), mask.tolist()):
        kept = [token for token, is_real in zip(ids, real) if is_real]
        shares.append(kept.count(letter_id) / len(kept))
    return torch.tensor(shares)


@wrong("3.2", floats(1, 2, 1, 3, 4, 5), 3)
def equal_by_first_and_last(rewards, group_size):
    r = rewards.view(-1, group_size)
    a = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)
    return torch.where(r[:, :1] == r[:, -1:], 0.0, a).flatten()


@right("3.2")
def by_numpy(rewards, group_size):
    r = rewards.numpy().reshape(-1, group_size)
    a = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-4)
    a[r.max(1) == r.min(1)] = 0
    return torch.from_numpy(a.reshape(-1))


@wrong("3.3", floats(50.0, 1.0), floats(-1.0, 1.0), 0.2, 0.2)
def ratio_kept_below_ten(ratio, advantages, low, high):
    ratio = ratio.clamp(max=10.0)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


@wrong("3.3", floats(0.0, 1.0), floats(1.0, 1.0), 0.2, 0.2)
def ratio_kept_above_zero(ratio, advantages, low, high):
    ratio = ratio.clamp(min=1e-8)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


@right("3.3")
def one_bound_per_sign(ratio, advantages, low, high):
    capped = torch.where(advantages > 0, ratio.clamp(max=1 + high), ratio.clamp(min=1 - low))
    return capped * advantages


@wrong("3.4", NEW, OLD, REAL)
def certain_tokens_taken_for_padding(log_probs, ref_log_probs, mask):
    x = torch.where(mask.bool() & (log_probs < 0), ref_log_probs - log_probs, 0.0)
    return x.exp() - x - 1


@right("3.4")
def real_tokens_picked(log_probs, ref_log_probs, mask):
    real, k3 = mask > 0, torch.zeros_like(log_probs)
    x = ref_log_probs[real] - log_probs[real]
    k3[real] = torch.expm1(x) - x
    return k3


def sequence_ratio(log_probs, old_log_probs, mask):
    return torch.where(mask.bool(), log_probs - old_log_probs, 0.0).sum(dim=-1).exp()


@wrong("3.5", *TIGHT[:2], floats(1.0, 0.0, -1.0), *TIGHT[3:])
def idle_rows_left_out(log_probs, old_log_probs, advantages, mask, clip):
    ratio = sequence_ratio(log_probs, old_log_probs, mask)
    J = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -J.sum() / (advantages != 0).sum().clamp(min=1)


@right("3.5")
def text_by_text(log_probs, old_log_probs, advantages, mask, clip):
    losses = []
    for new, old, A, real in zip(log_probs, old_log_probs, advantages, mask.bool()):
        ratio = (new[real] - old[real]).sum().exp()
        losses.append(torch.max(-A * ratio, -A * ratio.clamp(1 - clip, 1 + clip)))
    return sum(losses) / len(losses)


def compared(rewards):
    same = rewards.max() == rewards.min()
    return torch.where(same, 0.0, (rewards - rewards.mean()) / (rewards.std() + 1e-4))


@right("3.6")
def by_hand(logits, tokens, rewards, lr):
    probs, moved = F.softmax(logits, dim=0), logits.clone()
    for word, A in zip(tokens.tolist(), compared(rewards)):
        one_hot = F.one_hot(torch.tensor(word), len(logits))
        moved = moved + lr * A * (one_hot - probs) / len(tokens)
    return moved
