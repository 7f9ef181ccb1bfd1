"""Answers to the exercises of notebook 04."""

import math

import torch
from attack import right


@right("4.1")
def matrix_of_weights(rewards, group_size):
    eye = torch.eye(group_size, dtype=rewards.dtype)
    weights = eye - (1 - eye) / (group_size - 1)
    return torch.einsum("pj,ij->pi", rewards.unflatten(0, (-1, group_size)), weights).ravel()


@right("4.2")
def rows_in_a_list(per_token, mask, how, max_length):
    texts = [row[keep] for row, keep in zip(per_token, mask == 1)]
    if how == "token_mean":
        return torch.cat(texts).mean()
    scale = [max(len(t), 1) if how == "sequence_mean" else max_length for t in texts]
    return sum(t.sum() / s for t, s in zip(texts, scale)) / len(texts)


@right("4.3")
def token_by_token(log_probs, old_log_probs, advantages, mask, cap):
    total = 0.0
    for new, old, a, keep in zip(log_probs, old_log_probs, advantages, mask.bool()):
        with torch.no_grad():
            weight = (new[keep] - old[keep]).clamp(max=math.log(cap)).exp() * a
        total = total - weight @ new[keep] / len(weight)
    return total / len(mask)
