"""Answers to the exercises of notebook 01."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong
from torch import nn

AABB = torch.tensor([0, 0, 1, 1])
GAPS = torch.tensor([3, 3, 9, 3, 4, 9, 9, 4])
WIDE = torch.tensor([1, 300, 2, 300, 1, 44, 2, 300, 5, 1, 44, 299, 1, 300])


def _noise(*shape, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(3)).double()


# 1.1


def _pairs(ids):
    size = int(ids.max()) + 1
    pairs = torch.zeros(size, size, dtype=torch.float64)
    ones = torch.ones(len(ids) - 1, dtype=torch.float64)
    return pairs.index_put((ids[:-1], ids[1:]), ones, accumulate=True)


def _bits(counts):
    p = torch.as_tensor(counts, dtype=torch.float64).flatten()
    p = p[p > 0] / p.sum()
    return -(p * p.log()).sum().item()


@wrong("1.1", AABB)
def of_the_pair(ids):
    return _bits(_pairs(ids))


@wrong("1.1", AABB)
def minus_the_unigram(ids):
    return _bits(_pairs(ids)) - _bits(torch.bincount(ids))


@wrong("1.1", AABB)
def in_bits(ids):
    pairs = _pairs(ids)
    return (_bits(pairs) - _bits(pairs.sum(dim=1))) / math.log(2)


@wrong("1.1", torch.tensor([0, 0, 1, 0, 2, 2]))
def given_the_next(ids):
    pairs = _pairs(ids)
    return _bits(pairs) - _bits(pairs.sum(dim=0))


@wrong("1.1", GAPS)
def gaps_give_nan(ids):
    pairs = _pairs(ids)
    given = pairs / pairs.sum(dim=1, keepdim=True)
    return -(pairs / pairs.sum() * (given + 1e-12).log()).sum().item()


@wrong("1.1", torch.tensor([0, 0, 1, 1, 0]).repeat(30).cumsum(0) % 23)
def eps_in_the_log(ids):
    pairs = _pairs(ids)
    given = pairs / (pairs.sum(dim=1, keepdim=True) + 1e-5)
    return -(pairs / pairs.sum() * (given + 1e-5).log()).sum().item()


@wrong("1.1", torch.tensor([0, 0, 1, 0, 1, 2, 1]))
def rows_count_alike(ids):
    return float(np.mean([_bits(row) for row in _pairs(ids) if row.sum() > 0]))


@wrong("1.1", torch.tensor([0, 1, 1, 0, 0, 1, 2]))
def every_second_pair(ids):
    pairs = Counter(zip(ids[::2].tolist(), ids[1::2].tolist()))
    first = Counter(ids[::2].tolist())
    total = sum(pairs.values())
    return -sum(n / total * math.log(n / first[a]) for (a, _), n in pairs.items())


@wrong("1.1", AABB)
def around_the_end(ids):
    pairs = Counter(zip(ids.tolist(), ids.roll(-1).tolist()))
    first = Counter(ids.tolist())
    return -sum(n / len(ids) * math.log(n / first[a]) for (a, _), n in pairs.items())


@wrong("1.1", torch.tensor([1, 12, 11, 2, 1, 12, 3]))
def glued_digits(ids):
    names = [f"{a}{b}" for a, b in itertools.pairwise(ids.tolist())]
    return _bits(list(Counter(names).values())) - _bits(torch.bincount(ids[:-1]))


@wrong("1.1", WIDE)
def of_bytes(ids):
    text = bytes(ids.tolist())
    joint = Counter(itertools.pairwise(text))
    return _bits(list(joint.values())) - _bits(list(Counter(text[:-1]).values()))


@wrong("1.1", torch.tensor([0, 65, 1, 0, 66, 0, 65, 1]))
def base_65(ids):
    joint = torch.bincount(ids[:-1] * 65 + ids[1:])
    return _bits(joint) - _bits(torch.bincount(ids[:-1]))


@wrong("1.1", torch.tensor([0, 2, 1, 0, 0, 2, 2, 0, 1]))
def base_of_the_largest(ids):
    joint = torch.bincount(ids[:-1] * ids.max() + ids[1:])
    return _bits(joint) - _bits(torch.bincount(ids[:-1]))


@wrong("1.1", torch.tensor([0, 1, 100, 1, 0, 1, 0, 0, 100, 0]))
def bins_by_range(ids):
    joint, *_ = np.histogram2d(ids[:-1].numpy(), ids[1:].numpy(), bins=len(ids.unique()))
    return _bits(joint) - _bits(joint.sum(axis=1))


@wrong("1.1", torch.tensor([0, 1, 0, 2, 0, 1, 0, 2]))
def runs_only(ids):
    _, joint = torch.stack([ids[:-1], ids[1:]]).unique_consecutive(dim=1, return_counts=True)
    return _bits(joint) - _bits(torch.bincount(ids[:-1]))


@wrong("1.1", GAPS)
def moved_in_place(ids):
    ids -= ids.min()
    pairs = _pairs(ids)
    return _bits(pairs) - _bits(pairs.sum(dim=1))


@wrong("1.1", AABB)
def no_id_zero(ids):
    ids = ids[ids != 0]
    return _bits(_pairs(ids)) - _bits(torch.bincount(ids[:-1]))


@wrong("1.1", AABB)
def over_all_characters(ids):
    pairs = _pairs(ids)
    given = pairs / pairs.sum(dim=1, keepdim=True).clamp(min=1)
    return -(pairs / len(ids) * given.clamp(min=1e-12).log()).sum().item()


@right("1.1")
def counters(ids):
    after = defaultdict(Counter)
    for a, b in itertools.pairwise(ids.tolist()):
        after[a][b] += 1
    cost = -sum(n * math.log(n / c.total()) for c in after.values() for n in c.values())
    return cost / (len(ids) - 1)


@right("1.1")
def chain_rule(ids):
    _, joint = torch.stack([ids[:-1], ids[1:]]).unique(dim=1, return_counts=True)
    return _bits(joint) - _bits(ids[:-1].unique(return_counts=True)[1])


@right("1.1")
def one_hot_product(ids):
    hot = F.one_hot(ids).double()
    pairs = hot[:-1].T @ hot[1:]
    rows = pairs / pairs.sum(dim=1, keepdim=True).clamp(min=1)
    return -torch.special.xlogy(pairs, rows).sum().item() / (len(ids) - 1)


@right("1.1")
def mean_price(ids):
    a, b = ids.numpy()[:-1], ids.numpy()[1:]
    table = np.zeros((ids.max() + 1,) * 2)
    np.add.at(table, (a, b), 1)
    return float(np.mean(np.log(table.sum(axis=1)[a]) - np.log(table[a, b])))


# 1.2

BLOCK = torch.ones(256, 256).tril().bool()


@wrong("1.2", 3)
def floats(length):
    return torch.tril(torch.ones(length, length))


@wrong("1.2", 3)
def byte_mask(length):
    return torch.ones(length, length, dtype=torch.uint8).tril()


@wrong("1.2", 3)
def columns_read(length):
    return torch.ones(length, length, dtype=torch.bool).triu()


@wrong("1.2", 3)
def true_is_hidden(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


@wrong("1.2", 3)
def not_itself(length):
    return torch.ones(length, length).tril(-1).bool()


@wrong("1.2", 3)
def one_ahead(length):
    return torch.ones(length, length).tril(diagonal=1) == 1


@wrong("1.2", 3)
def additive(length):
    return nn.Transformer.generate_square_subsequent_mask(length)


@wrong("1.2", 3)
def additive_as_bool(length):
    return nn.Transformer.generate_square_subsequent_mask(length).bool()


@wrong("1.2", 300)
def block_size(length):
    return BLOCK[:length, :length]


@wrong("1.2", 3)
def rows_of_the_block(length):
    return BLOCK[:length]


@wrong("1.2", 3)
def four_axes(length):
    return torch.ones(length, length).tril().bool().view(1, 1, length, length)


@wrong("1.2", 3)
def indices_for_rows(length):
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[torch.tril_indices(length, length)] = True
    return mask


@wrong("1.2", 1)
def squeezed(length):
    return torch.ones(1, length, length).tril().bool().squeeze()


@wrong("1.2", 300)
def small_positions(length):
    at = torch.arange(length).to(torch.uint8)
    return at[:, None] >= at


@wrong("1.2", 3)
def unsigned_difference(length):
    at = torch.arange(length).to(torch.uint8)
    return at[:, None] - at >= 0


@wrong("1.2", 300)
def rounded_positions(length):
    at = torch.arange(length, dtype=torch.bfloat16)
    return at[:, None] >= at[None, :]


@wrong("1.2", 300)
def last_64(length):
    return torch.ones(length, length, dtype=torch.bool).tril().triu(-63)


@wrong("1.2", 3)
def no_first_row(length):
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i in range(1, length):
        mask[i, : i + 1] = True
    return mask


@right("1.2")
def compared(length):
    i, j = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    return torch.le(j, i)


@right("1.2")
def nested_lists(length):
    return torch.tensor([[j <= i for j in range(length)] for i in range(length)])


@right("1.2")
def summed_eye(length):
    return torch.eye(length).cumsum(dim=-2) > 0


@right("1.2")
def from_numpy(length):
    return torch.from_numpy(np.tri(length, dtype=bool))


# 1.3

CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()
ODD = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 0, 1], [0, 1, 1, 0]], dtype=torch.bool)
QKV = tuple(_noise(3, 2, 2, 4, 3).unbind(0))
STEEP = QKV[0] * 3e3, QKV[1] * 3e3, QKV[2]
VIEWS = tuple(part.transpose(1, 2) for part in _noise(3, 2, 4, 2, 3).unbind(0))


def _scores(query, key):
    return query @ key.mT / math.sqrt(query.shape[-1])


@wrong("1.3", *QKV, CAUSAL)
def unscaled(query, key, value, mask):
    return (query @ key.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ value


@wrong("1.3", *QKV, CAUSAL)
def by_d(query, key, value, mask):
    scores = query @ key.mT / query.size(-1)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@wrong("1.3", *QKV, CAUSAL)
def by_length(query, key, value, mask):
    scores = query @ key.mT / key.shape[2] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@wrong("1.3", *QKV, CAUSAL)
def head_size_16(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, mask, scale=0.25)


@wrong("1.3", *QKV, CAUSAL)
def forbidden_read(query, key, value, mask):
    return _scores(query, key).masked_fill(mask, -1e30).softmax(-1) @ value


@wrong("1.3", *QKV, ODD)
def always_causal(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@wrong("1.3", *QKV, ODD)
def causal_too(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, mask.tril())


@wrong("1.3", *QKV, ODD)
def itself_too(query, key, value, mask):
    mask = mask | torch.eye(len(mask), dtype=torch.bool)
    return F.scaled_dot_product_attention(query, key, value, mask)


@wrong("1.3", *QKV, ODD)
def mask_by_columns(query, key, value, mask):
    return _scores(query, key).masked_fill(~mask.T, -torch.inf).softmax(-1) @ value


@wrong("1.3", *QKV, ODD)
def no_renormalising(query, key, value, mask):
    return (_scores(query, key).softmax(-1) * mask) @ value


@wrong("1.3", *STEEP, ODD)
def renormalised_late(query, key, value, mask):
    share = _scores(query, key).softmax(-1) * mask
    return share / (share.sum(-1, keepdim=True) + 1e-9) @ value


@wrong("1.3", *QKV, CAUSAL)
def zero_for_minus_inf(query, key, value, mask):
    return (_scores(query, key) * mask).softmax(-1) @ value


@wrong("1.3", *STEEP, ODD)
def minus_ten_thousand(query, key, value, mask):
    return _scores(query, key).masked_fill(~mask, -1e4).softmax(-1) @ value


@wrong("1.3", *STEEP, ODD)
def a_million_lower(query, key, value, mask):
    return (_scores(query, key) - 1e6 * (~mask).double()).softmax(-1) @ value


@wrong("1.3", *STEEP, ODD)
def bare_exp(query, key, value, mask):
    e = _scores(query, key).exp() * mask
    return (e / e.sum(-1, keepdim=True)) @ value


@wrong("1.3", *STEEP, ODD)
def max_of_all(query, key, value, mask):
    scores = _scores(query, key)
    e = (scores - scores.amax(-1, keepdim=True)).exp() * mask
    return (e / e.sum(-1, keepdim=True)) @ value


@wrong("1.3", *STEEP, CAUSAL)
def clamped(query, key, value, mask):
    scores = _scores(query, key).clamp(-50, 50)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@wrong("1.3", *VIEWS, CAUSAL)
def views_of_views(query, key, value, mask):
    n, h, s, d = query.shape
    q, k, v = (part.view(n * h, s, d) for part in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, mask).view(n, h, s, d)


@wrong("1.3", *QKV, CAUSAL)
def key_reshaped(query, key, value, mask):
    n, h, s, d = key.shape
    scores = query @ key.reshape(n, h, d, s) / d**0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@wrong("1.3", *QKV, CAUSAL)
def over_queries(query, key, value, mask):
    return _scores(query, key).masked_fill(~mask, -torch.inf).softmax(-2) @ value


@wrong("1.3", *QKV, CAUSAL)
def weights_as_numbers(query, key, value, mask):
    share = _scores(query, key).masked_fill(~mask, -torch.inf).softmax(-1)
    return share.detach() @ value


@wrong("1.3", *(part[:1] for part in QKV), CAUSAL)
def one_text_squeezed(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, mask).squeeze(0)


@wrong("1.3", *QKV, ODD)
def mask_turned_in_place(query, key, value, mask):
    return _scores(query, key).masked_fill(mask.logical_not_(), -torch.inf).softmax(-1) @ value


@wrong("1.3", *QKV, CAUSAL)
def steps_first(query, key, value, mask):
    share = _scores(query, key).masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("nhqk,nhkd->nqhd", share, value)


@right("1.3")
def library(query, key, value, mask):
    return F.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=mask)


@right("1.3")
def additive_mask(query, key, value, mask):
    bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)
    scores = torch.einsum("nhid,nhjd->nhij", query, key) * query.size(-1) ** -0.5 + bias
    return torch.einsum("nhij,nhjd->nhid", F.softmax(scores, dim=-1), value)


@right("1.3")
def row_by_row(query, key, value, mask):
    out = []
    for i, may in enumerate(mask):
        scores = (key[:, :, may] * query[:, :, i, None]).sum(dim=-1) / math.sqrt(key.shape[-1])
        out.append((scores.softmax(dim=-1).unsqueeze(-1) * value[:, :, may]).sum(dim=-2))
    return torch.stack(out, dim=2)


@right("1.3")
def by_hand_with_max(query, key, value, mask):
    scores = torch.where(mask, _scores(query, key), float("-inf"))
    e = torch.exp(scores - scores.amax(dim=-1, keepdim=True).detach())
    return e @ value / e.sum(dim=-1, keepdim=True)


# 1.4

LOGITS, IDS = _noise(2, 4, 5), torch.tensor([[0, 3, 0, 1], [2, 2, 0, 3]])
ALSO = torch.tensor([[0, 4, 0, 1], [2, 2, 0, 4]])
LARGE = 2000 * LOGITS


def _log_probs(logits, input_ids):
    return logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


@wrong("1.4", LOGITS, IDS)
def no_shift(logits, input_ids):
    return F.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


@wrong("1.4", LOGITS, IDS)
def shift_backwards(logits, input_ids):
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), input_ids[:, :-1].flatten())


@wrong("1.4", LOGITS, IDS)
def shift_across_windows(logits, input_ids):
    return F.cross_entropy(logits.flatten(0, 1)[:-1], input_ids.flatten()[1:])


@wrong("1.4", LOGITS, IDS)
def rolled(logits, input_ids):
    return F.cross_entropy(logits.flatten(0, 1), input_ids.roll(-1, dims=1).flatten())


@wrong("1.4", LOGITS, IDS)
def by_all_positions(logits, input_ids):
    return -_log_probs(logits, input_ids).sum() / input_ids.numel()


@wrong("1.4", LOGITS, IDS)
def windows_summed(logits, input_ids):
    return -_log_probs(logits, input_ids).mean(dim=-1).sum()


@wrong("1.4", LOGITS, IDS)
def first_window(logits, input_ids):
    return F.cross_entropy(logits[0, :-1], input_ids[0, 1:])


@wrong("1.4", LOGITS, IDS)
def zero_is_padding(logits, input_ids):
    targets = input_ids[:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=0)


@wrong("1.4", LOGITS, ALSO)
def last_id_is_padding(logits, input_ids):
    predictions, targets = logits[:, :-1].mT, input_ids[:, 1:]
    return F.cross_entropy(predictions, targets, ignore_index=logits.shape[-1] - 1)


@wrong("1.4", LARGE, IDS)
def log_of_softmax(logits, input_ids):
    p = logits[:, :-1].softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1))
    return -(p + 1e-12).log().mean()


@wrong("1.4", LARGE, IDS)
def raw_exp(logits, input_ids):
    z = logits[:, :-1]
    chosen = z.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return (z.exp().sum(-1).log() - chosen).mean()


@wrong("1.4", LARGE, IDS)
def max_of_the_batch(logits, input_ids):
    z = logits[:, :-1] - logits.max()
    chosen = z.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return (z.exp().sum(-1).log() - chosen).mean()


@wrong("1.4", LARGE, IDS)
def logits_clamped(logits, input_ids):
    predictions = logits[:, :-1].clamp(-100, 100)
    return F.cross_entropy(predictions.flatten(0, 1), input_ids[:, 1:].flatten())


@wrong("1.4", LARGE, IDS)
def price_clamped(logits, input_ids):
    return -_log_probs(logits, input_ids).clamp(min=-100).mean()


@wrong("1.4", LOGITS, IDS)
def hot_without_size(logits, input_ids):
    hot = F.one_hot(input_ids[:, 1:])
    return -(hot * logits[:, :-1].log_softmax(-1)).sum(-1).mean()


@wrong("1.4", LOGITS, IDS)
def seen_ids_only(logits, input_ids):
    predictions = logits[:, :-1, : int(input_ids.max()) + 1]
    return F.cross_entropy(predictions.flatten(0, 1), input_ids[:, 1:].flatten())


@wrong("1.4", LOGITS, IDS)
def classes_by_view(logits, input_ids):
    n, s, v = logits.shape
    return F.cross_entropy(logits[:, :-1].reshape(n, v, s - 1), input_ids[:, 1:])


@wrong("1.4", LOGITS, IDS)
def labels_in_place(logits, input_ids):
    labels = input_ids
    labels[:, 0] = -100
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@wrong("1.4", LOGITS, IDS)
def a_new_leaf(logits, input_ids):
    return torch.tensor(-_log_probs(logits, input_ids).mean().item(), requires_grad=True)


@wrong("1.4", LOGITS, IDS)
def softmax_of_positions(logits, input_ids):
    logs = F.log_softmax(logits[:, :-1], dim=1)
    return -logs.gather(2, input_ids[:, 1:, None]).mean()


@wrong("1.4", LOGITS, IDS)
def twice_softmax(logits, input_ids):
    return F.cross_entropy(logits[:, :-1].softmax(-1).flatten(0, 1), input_ids[:, 1:].flatten())


@wrong("1.4", LOGITS, IDS)
def class_means(logits, input_ids):
    targets = input_ids[:, 1:].flatten()
    weight = 1 / torch.bincount(targets, minlength=logits.shape[-1]).clamp(min=1).to(logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, weight=weight)


PRICE = nn.CrossEntropyLoss(reduction="sum")


@right("1.4")
def module_and_sum(logits, input_ids):
    n, s, v = logits.shape
    total = PRICE(logits[:, :-1, :].reshape(-1, v), input_ids[:, 1:].reshape(-1))
    return total / (n * (s - 1))


@right("1.4")
def classes_second(logits, input_ids):
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="mean")


@right("1.4")
def masked_label(logits, input_ids):
    labels = torch.full_like(input_ids, -100)
    labels[:, :-1] = input_ids[:, 1:]
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))


@right("1.4")
def loops(logits, input_ids):
    prices = []
    for window, ids in zip(logits, input_ids.tolist()):
        prices += [z.logsumexp(0) - z[b] for z, b in zip(window, ids[1:])]
    return sum(prices) / len(prices)


# 1.5

HOLES = _noise(3, 4).index_fill(1, torch.tensor([1]), -torch.inf)
BATCH = _noise(2, 3, 4)
SQUARE = _noise(4, 4)


@wrong("1.5", BATCH, 0.5)
def divided_after(logits, temperature):
    return F.log_softmax(logits, dim=-1) / temperature


@wrong("1.5", BATCH, 0.5)
def multiplied(logits, temperature):
    return torch.log_softmax(logits * temperature, dim=-1)


@wrong("1.5", BATCH, 0.5)
def probabilities(logits, temperature):
    return (logits / temperature).softmax(-1)


@wrong("1.5", BATCH, 0.5)
def over_axis_1(logits, temperature):
    return (logits / temperature).log_softmax(dim=1)


@wrong("1.5", SQUARE, 2)
def without_keepdim(logits, temperature):
    z = logits / temperature
    return z - z.logsumexp(-1)


@wrong("1.5", BATCH, 1e-3)
def log_after_softmax(logits, temperature):
    return (logits / temperature).softmax(-1).log()


@wrong("1.5", BATCH, 0.01)
def log_plus_eps(logits, temperature):
    return ((logits / temperature).softmax(-1) + 1e-10).log()


@wrong("1.5", 800 * BATCH, 0.5)
def powers(logits, temperature):
    p = logits.softmax(-1) ** (1 / temperature)
    return (p / p.sum(-1, keepdim=True)).log()


@wrong("1.5", BATCH, 1e-6)
def temperature_floor(logits, temperature):
    return (logits / max(temperature, 1e-5)).log_softmax(-1)


@wrong("1.5", BATCH, 1e-6)
def temperature_plus_eps(logits, temperature):
    return (logits / (temperature + 1e-8)).log_softmax(-1)


@wrong("1.5", 1000 * BATCH, 500)
def temperature_ceiling(logits, temperature):
    return (logits / min(temperature, 100.0)).log_softmax(-1)


@wrong("1.5", BATCH, 1)
def one_is_untouched(logits, temperature):
    return logits if temperature == 1 else (logits / temperature).log_softmax(-1)


@wrong("1.5", torch.tensor([[2.0, 2.0, 1.0]]).double(), 1e-4)
def greedy_when_tiny(logits, temperature):
    if temperature < 1e-3:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits).log()
    return (logits / temperature).log_softmax(-1)


@wrong("1.5", 1e6 * BATCH, 1e6)
def uniform_when_huge(logits, temperature):
    if temperature > 1e5:
        logits = torch.zeros_like(logits)
    return (logits / temperature).log_softmax(-1)


@wrong("1.5", HOLES, 1)
def holes_to_the_lowest(logits, temperature):
    return (logits / temperature).log_softmax(-1).nan_to_num()


@wrong("1.5", HOLES, 2)
def holes_clamped(logits, temperature):
    return (logits.clamp(min=-1e9) / temperature).log_softmax(-1)


@wrong("1.5", HOLES, 2)
def holes_to_nan(logits, temperature):
    z = logits / temperature
    z = z - z.mean(-1, keepdim=True)
    return z - z.exp().sum(-1, keepdim=True).log()


@wrong("1.5", BATCH, 1e-4)
def largest_of_all(logits, temperature):
    z = (logits - logits.max()) / temperature
    return z - z.exp().sum(-1, keepdim=True).log()


@wrong("1.5", BATCH, 1e-4)
def exp_overflows(logits, temperature):
    z = logits / temperature
    return z - z.exp().sum(-1, keepdim=True).log()


@wrong("1.5", BATCH.transpose(0, 1), 2)
def viewed_rows(logits, temperature):
    rows = logits.view(-1, logits.shape[-1]) / temperature
    return rows.log_softmax(-1).view(logits.shape)


@wrong("1.5", BATCH.transpose(0, 1), 2)
def reshaped_by_storage(logits, temperature):
    return (logits / temperature).log_softmax(-1).reshape(-1, logits.shape[-1])


@wrong("1.5", BATCH, 2)
def constant_normaliser(logits, temperature):
    z = logits / temperature
    return z - z.detach().logsumexp(-1, keepdim=True)


@wrong("1.5", BATCH, 0.7)
def divided_in_place(logits, temperature):
    logits.data /= temperature
    return logits.log_softmax(-1)


@wrong("1.5", BATCH, 1.5)
def whole_temperature(logits, temperature):
    return (logits / max(int(temperature), 1)).log_softmax(-1)


@wrong("1.5", _noise(4), 0.5)
def at_least_two_axes(logits, temperature):
    return torch.stack([row.log_softmax(-1) for row in logits / temperature])


@right("1.5")
def normalised_by_hand(logits, temperature):
    z = logits / temperature
    return z - torch.logsumexp(z, dim=-1, keepdim=True)


@right("1.5")
def largest_of_each(logits, temperature):
    z = logits.div(temperature)
    z = z - z.amax(-1, keepdim=True).detach()
    return z - z.exp().sum(-1, keepdim=True).log()


@right("1.5")
def recursive(logits, temperature):
    if logits.dim() > 1:
        return torch.stack([recursive(row, temperature) for row in logits])
    return nn.LogSoftmax(dim=0)(logits / temperature)


def _warm(function):
    @functools.wraps(function)
    def inner(logits, temperature):
        return function(torch.true_divide(logits, float(temperature)))

    return inner


@right("1.5")
@_warm
def decorated(scaled):
    return torch.distributions.Categorical(logits=scaled, validate_args=False).logits
