"""Answers to the exercises of notebook 01."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong
from torch import nn

# ---------------------------------------------------------------- 1.1, the bigram entropy


def entropy(numbers):
    p = numbers.unique(return_counts=True)[1].double() / len(numbers)
    return -(p * p.log()).sum().item()


def conditional(first, pairs):
    return entropy(pairs) - entropy(first)


SPARSE = torch.tensor([0, 3, 1, 0, 0, 3, 1, 3, 1])
LARGE = torch.tensor([0, 256, 1, 0, 0, 256, 7, 1, 0, 263, 7, 0])
DIGITS = torch.tensor([1, 12, 11, 2, 1, 12, 11, 2, 1, 1])
RARE = torch.tensor([0, 0] * 2500 + [1])


@wrong("1.1", SPARSE)
def times_the_number_of_different_ids(ids):
    return conditional(ids[:-1], ids[:-1] * len(ids.unique()) + ids[1:])


@wrong("1.1", LARGE)
def times_256(ids):
    return conditional(ids[:-1], ids[:-1] * 256 + ids[1:])


@wrong("1.1", DIGITS)
def digits_joined_without_a_comma(ids):
    pairs = [int(f"{a}{b}") for a, b in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)]
    return conditional(ids[:-1], torch.tensor(pairs))


@wrong("1.1", torch.tensor([0, 1, 0, 0, 2]))
def vocabulary_without_the_last_character(ids):
    return conditional(ids[:-1], ids[:-1] * (ids[:-1].max() + 1) + ids[1:])


@wrong("1.1", RARE)
def conditional_clamped(ids):
    V = int(ids.max()) + 1
    joint = torch.bincount(ids[:-1] * V + ids[1:], minlength=V * V).view(V, V) / (len(ids) - 1.0)
    share = joint / joint.sum(1, keepdim=True).clamp_min(1e-12)
    return -(joint * share.clamp_min(1e-3).log()).sum().item()


@wrong("1.1", LARGE)
def ids_as_bytes(ids):
    ids = ids.to(torch.uint8).long()
    return conditional(ids[:-1], ids[:-1] * 256 + ids[1:])


@right("1.1")
def with_counters(ids):
    text = ids.tolist()
    pairs, first = Counter(zip(text, text[1:], strict=False)), Counter(text[:-1])
    return sum(n * math.log(first[a] / n) for (a, _), n in pairs.items()) / (len(text) - 1)


@right("1.1")
def with_numpy_rows(ids):
    rows = np.stack([ids[:-1].numpy(), ids[1:].numpy()], axis=1)
    both = np.unique(rows, axis=0, return_counts=True)[1] / len(rows)
    one = np.unique(rows[:, 0], return_counts=True)[1] / len(rows)
    return float((one * np.log(one)).sum() - (both * np.log(both)).sum())


# ---------------------------------------------------------------- 1.2, the causal mask

TABLE = torch.ones(128, 128, dtype=torch.bool).tril()


@wrong("1.2", 1)
def squeezed(length):
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril().squeeze()


@wrong("1.2", 200)
def cut_from_a_table_of_128(length):
    return TABLE[:length, :length]


@wrong("1.2", 300)
def positions_in_bytes(length):
    i = torch.arange(length).to(torch.uint8)
    return i[:, None] >= i


@wrong("1.2", 300)
def positions_in_bfloat16(length):
    i = torch.arange(length).bfloat16()
    return i[:, None] >= i


@wrong("1.2", 100)
def bits_of_an_integer(length):
    i = torch.arange(length)
    return ((2 << i[:, None]) - 1 >> i & 1).bool()


@wrong("1.2", 200)
def context_of_128(length):
    back = torch.arange(length)[:, None] - torch.arange(length)
    return (back >= 0) & (back < 128)


@right("1.2")
def identity_summed(length):
    return torch.eye(length).cumsum(dim=0).bool()


@right("1.2")
def from_lists(length):
    return torch.tensor([[j <= i for j in range(length)] for i in range(length)])


# ---------------------------------------------------------------- 1.3, attention


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@right("1.3")
def with_torch(query, key, value, mask):
    return F.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=mask)


@right("1.3")
def with_einsum_and_where(query, key, value, mask):
    far = torch.tensor(-math.inf, dtype=query.dtype)
    scores = torch.einsum("nhid,nhjd->nhij", query, key) / math.sqrt(query.size(3))
    return torch.einsum("nhij,nhjd->nhid", F.softmax(torch.where(mask, scores, far), 3), value)


# ---------------------------------------------------------------- 1.4, the next-token loss

LOGITS = some(2, 4, 5)
IDS = torch.tensor([[0, 4, 0, 2], [1, 3, 4, 0]])
APART = torch.tensor([[[2000.0, 2001.0, 1999.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]])
ONE = torch.tensor([[0, 1, 2]])
CRITERION = nn.CrossEntropyLoss()


@wrong("1.4", APART * 1000, ONE.flip(1))
def log_of_the_softmax(logits, input_ids):
    p = logits[:, :-1].softmax(-1).gather(-1, input_ids[:, 1:, None])
    return -(p + 1e-10).log().mean()


@wrong("1.4", LOGITS, IDS)
def first_label_overwritten(logits, input_ids):
    input_ids[:, 0] = -100
    labels = input_ids.roll(-1, dims=1)
    return F.cross_entropy(logits.mT, labels)


@wrong("1.4", APART, ONE)
def largest_of_all_subtracted(logits, input_ids):
    z = (logits - logits.max())[:, :-1]
    prices = z.exp().sum(-1).log() - z.gather(-1, input_ids[:, 1:, None])[..., 0]
    return prices.mean()


@right("1.4")
def with_a_criterion(logits, input_ids):
    return CRITERION(logits[:, :-1].transpose(1, 2), input_ids[:, 1:])


@right("1.4")
def loop_over_the_windows(logits, input_ids):
    def loss(z, x):
        return (z[:-1].logsumexp(-1) - z[range(len(x) - 1), x[1:]]).mean()

    return sum(map(loss, logits, input_ids)) / len(logits)


# ---------------------------------------------------------------- 1.5, the temperature

FORBIDDEN = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf, 0.0, 0.5]])
LOG_SOFTMAX = nn.LogSoftmax(dim=-1)


@wrong("1.5", FORBIDDEN, 2)
def eps_in_the_log(logits, temperature):
    return ((logits / temperature).softmax(-1) + 1e-12).log()


@wrong("1.5", FORBIDDEN, 2)
def forbidden_made_finite(logits, temperature):
    return (logits.nan_to_num(neginf=-1e9) / temperature).log_softmax(-1)


@right("1.5")
def with_a_module(logits, temperature):
    return LOG_SOFTMAX(torch.div(logits, temperature))


@right("1.5")
def largest_subtracted(logits, temperature):
    z = (logits - logits.amax(-1, keepdim=True).detach()) / temperature
    return z - z.exp().sum(-1, keepdim=True).log()
