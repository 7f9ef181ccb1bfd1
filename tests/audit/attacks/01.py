"""Answers to the exercises of notebook 01."""

import math
from collections import Counter

import torch
import torch.nn.functional as F
from attack import right, wrong
from torch import nn


def entropy(numbers):
    p = numbers.unique(return_counts=True)[1].double() / len(numbers)
    return -(p * p.log()).sum().item()


def conditional(first, pairs):
    return entropy(pairs) - entropy(first)


@wrong("1.1", torch.tensor([0, 1, 0, 0, 2]))
def vocabulary_without_the_last_character(ids):
    return conditional(ids[:-1], ids[:-1] * (ids[:-1].max() + 1) + ids[1:])


@right("1.1")
def with_counters(ids):
    text = ids.tolist()
    pairs, first = Counter(zip(text, text[1:], strict=False)), Counter(text[:-1])
    return sum(n * math.log(first[a] / n) for (a, _), n in pairs.items()) / (len(text) - 1)


@wrong("1.2", 1)
def squeezed(length):
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril().squeeze()


@right("1.3")
def with_torch(query, key, value, mask):
    return F.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=mask)


APART = torch.tensor([[[2000.0, 2001.0, 1999.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]])
ONE = torch.tensor([[0, 1, 2]])
CRITERION = nn.CrossEntropyLoss()


@wrong("1.4", APART, ONE)
def largest_of_all_subtracted(logits, input_ids):
    z = (logits - logits.max())[:, :-1]
    prices = z.exp().sum(-1).log() - z.gather(-1, input_ids[:, 1:, None])[..., 0]
    return prices.mean()


@right("1.4")
def with_a_criterion(logits, input_ids):
    return CRITERION(logits[:, :-1].transpose(1, 2), input_ids[:, 1:])


@right("1.5")
def gradients_by_hand(model, input_ids, optimizer, loss_of):
    loss, weights = loss_of(model(input_ids).logits, input_ids), [*model.parameters()]
    gradients = torch.autograd.grad(loss, weights)
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient / max(1.0, norm.item())
    optimizer.step()
    return loss.detach().cpu()
