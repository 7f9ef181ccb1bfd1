"""Answers to the exercises of notebook 01."""

from __future__ import annotations

import math
from collections import Counter
from functools import reduce

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


LETTERS = torch.tensor([0, 0, 1, 0, 2, 2, 1, 0, 1, 1, 2, 0, 1])
SPARSE = torch.tensor([0, 3, 1, 0, 0, 3, 1, 3, 1])
LARGE = torch.tensor([0, 256, 1, 0, 0, 256, 7, 1, 0, 263, 7, 0])
DIGITS = torch.tensor([1, 12, 11, 2, 1, 12, 11, 2, 1, 1])
RARE = torch.tensor([0, 0] * 2500 + [1])


@wrong("1.1", LETTERS)
def first_among_all_characters(ids):
    return conditional(ids, ids[:-1] * 1000 + ids[1:])


@wrong("1.1", LETTERS)
def the_text_is_a_ring(ids):
    return conditional(ids, ids * 1000 + ids.roll(-1))


@wrong("1.1", torch.tensor([0, 1, 1, 0, 2]))
def given_the_one_after(ids):
    return conditional(ids[1:], ids[:-1] * 1000 + ids[1:])


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


@wrong("1.1", SPARSE)
def times_the_largest_id(ids):
    return conditional(ids[:-1], ids[:-1] * ids.max() + ids[1:])


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


@right("1.1")
def entropy_of_each_follower(ids):
    a, b = ids[:-1], ids[1:]
    return sum(entropy(b[a == c]) * (a == c).double().mean().item() for c in a.unique())


# ---------------------------------------------------------------- 1.2, the causal mask

TABLE = torch.ones(128, 128, dtype=torch.bool).tril()


@wrong("1.2", 3)
def upper(length):
    return torch.ones(length, length, dtype=torch.bool).triu()


@wrong("1.2", 3)
def strictly_before(length):
    return torch.ones(length, length).tril(-1).bool()


@wrong("1.2", 3)
def zero_and_minus_infinity(length):
    return torch.full((length, length), -torch.inf).triu(1)


@wrong("1.2", 3)
def ones_and_zeros(length):
    return torch.ones(length, length, dtype=torch.uint8).tril()


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


@right("1.2")
def with_numpy_tri(length):
    return torch.from_numpy(np.tri(length, dtype=bool))


# ---------------------------------------------------------------- 1.3, attention


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()
QKV = tuple(some(2, 3, 4, 5, seed=seed) for seed in range(3))
VIEWS = tuple(some(2, 4, 3, 5, seed=seed).transpose(1, 2) for seed in range(3))
ANY = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 1], [1, 0, 0, 0]]).bool()


@wrong("1.3", *QKV, CAUSAL)
def not_scaled(query, key, value, mask):
    scores = query @ key.mT
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@wrong("1.3", *QKV, CAUSAL)
def scaled_by_the_positions(query, key, value, mask):
    scores = query @ key.mT / query.shape[-2] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@wrong("1.3", *QKV, ANY)
def causal_whatever_the_mask(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@wrong("1.3", *QKV, CAUSAL)
def scaled_by_a_whole_root(query, key, value, mask):
    scores = query @ key.mT / math.isqrt(query.shape[-1])
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@wrong("1.3", *QKV, ANY)
def itself_always_allowed(query, key, value, mask):
    mask = mask | torch.eye(len(mask), dtype=torch.bool)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@wrong("1.3", *VIEWS, CAUSAL)
def heads_joined_with_view(query, key, value, mask):
    q, k, v = (x.view(-1, *x.shape[2:]) for x in (query, key, value))
    scores = (torch.bmm(q, k.mT) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return torch.bmm(scores.softmax(-1), v).view(value.shape)


@wrong("1.3", *QKV, CAUSAL)
def shares_without_a_graph(query, key, value, mask):
    with torch.no_grad():
        scores = query @ key.mT / query.shape[-1] ** 0.5
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return shares @ value


@right("1.3")
def with_torch(query, key, value, mask):
    return F.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=mask)


@right("1.3")
def with_einsum_and_where(query, key, value, mask):
    far = torch.tensor(-math.inf, dtype=query.dtype)
    scores = torch.einsum("nhid,nhjd->nhij", query, key) / math.sqrt(query.size(3))
    return torch.einsum("nhij,nhjd->nhid", F.softmax(torch.where(mask, scores, far), 3), value)


@right("1.3")
def row_by_row_over_the_allowed(query, key, value, mask):
    rows = []
    for i, may in enumerate(mask):
        k, v = key[:, :, may], value[:, :, may]
        scores = (query[:, :, i : i + 1] * k).sum(-1) * query.shape[-1] ** -0.5  # (N, heads, may)
        rows.append((scores.softmax(-1)[..., None] * v).sum(-2))
    return torch.stack(rows, dim=2)


# ---------------------------------------------------------------- 1.4, the next-token loss

LOGITS = some(2, 4, 5)
IDS = torch.tensor([[0, 4, 0, 2], [1, 3, 4, 0]])
APART = torch.tensor([[[2000.0, 2001.0, 1999.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]])
ONE = torch.tensor([[0, 1, 2]])
CRITERION = nn.CrossEntropyLoss()


@wrong("1.4", LOGITS, IDS)
def not_shifted(logits, input_ids):
    return F.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


@wrong("1.4", LOGITS, IDS)
def divided_by_all_positions(logits, input_ids):
    total = F.cross_entropy(logits[:, :-1].mT, input_ids[:, 1:], reduction="sum")
    return total / input_ids.numel()


@wrong("1.4", APART * 1000, ONE.flip(1))
def log_of_the_softmax(logits, input_ids):
    p = logits[:, :-1].softmax(-1).gather(-1, input_ids[:, 1:, None])
    return -(p + 1e-10).log().mean()


@wrong("1.4", LOGITS, IDS)
def zero_taken_for_padding(logits, input_ids):
    return F.cross_entropy(logits[:, :-1].mT, input_ids[:, 1:], ignore_index=0)


@wrong("1.4", LOGITS, IDS)
def last_id_taken_for_the_end(logits, input_ids):
    return F.cross_entropy(logits[:, :-1].mT, input_ids[:, 1:], ignore_index=logits.shape[-1] - 1)


@wrong("1.4", LOGITS, IDS)
def windows_run_together(logits, input_ids):
    return F.cross_entropy(logits.flatten(0, 1)[:-1], input_ids.flatten()[1:])


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


@wrong("1.4", LOGITS, IDS)
def every_window_with_every_text(logits, input_ids):
    log_p = logits.log_softmax(-1)
    return -log_p[:, torch.arange(input_ids.shape[1] - 1), input_ids[:, 1:]].mean()


@right("1.4")
def with_a_criterion(logits, input_ids):
    return CRITERION(logits[:, :-1].transpose(1, 2), input_ids[:, 1:])


@right("1.4")
def loop_over_the_windows(logits, input_ids):
    def loss(z, x):
        return (z[:-1].logsumexp(-1) - z[range(len(x) - 1), x[1:]]).mean()

    return sum(map(loss, logits, input_ids)) / len(logits)


@right("1.4")
def rolled_with_a_mask(logits, input_ids):
    x = input_ids.roll(-1, dims=1)
    prices = -torch.take_along_dim(F.log_softmax(logits, dim=2), x.unsqueeze(2), dim=2).squeeze(2)
    counts = torch.arange(x.shape[1]) < x.shape[1] - 1
    return prices[counts.expand_as(prices)].mean()


# ---------------------------------------------------------------- 1.5, the temperature

BATCH = some(2, 3, 4)
SQUARE = some(4, 4)
FORBIDDEN = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf, 0.0, 0.5]])
LOG_SOFTMAX = nn.LogSoftmax(dim=-1)


@wrong("1.5", BATCH, 0.5)
def multiplied(logits, temperature):
    return (logits * temperature).log_softmax(-1)


@wrong("1.5", BATCH, 0.5)
def divided_after(logits, temperature):
    return logits.log_softmax(-1) / temperature


@wrong("1.5", FORBIDDEN, 2)
def eps_in_the_log(logits, temperature):
    return ((logits / temperature).softmax(-1) + 1e-12).log()


@wrong("1.5", BATCH, 2.0)
def along_dimension_one(logits, temperature):
    return (logits / temperature).log_softmax(min(1, logits.dim() - 1))


@wrong("1.5", SQUARE, 2.0)
def dimension_not_kept(logits, temperature):
    z = logits / temperature
    return z - z.logsumexp(-1)


@wrong("1.5", BATCH, 0.5)
def sum_without_a_graph(logits, temperature):
    z = logits / temperature
    return z - z.detach().logsumexp(-1, keepdim=True)


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


@right("1.5")
def with_logaddexp(logits, temperature):
    z = logits / float(temperature)
    return z - reduce(torch.logaddexp, z.split(1, dim=-1)[1:], z[..., :1])
