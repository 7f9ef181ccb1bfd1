"""Answers to the exercises of notebook 07."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong

TREE = torch.tensor([0.5, 0.2, 0.4]), torch.tensor([0.1, 0.2, -0.3, 1.0])
LONE = torch.tensor([0.25]), torch.tensor([0.1, 0.9])
SURE = torch.tensor([0.3, 1.0, 0.5]), torch.tensor([0.1, 0.4, 0.2, 1.0])


@wrong("7.1", *TREE)
def nobody_reaches_the_end(stop, rewards):
    total, here = 0.0, 1.0
    for p, reward in zip(stop, rewards):
        total, here = total + here * p * reward, here * (1 - p)
    return total


@wrong("7.1", *TREE)
def stop_is_go_on(stop, rewards):
    value = rewards[-1]
    for p, reward in zip(stop.flip(0), rewards[:-1].flip(0)):
        value = p * value + (1 - p) * reward
    return value


@wrong("7.1", *TREE)
def without_survival(stop, rewards):
    return (torch.cat([stop, (1 - stop).prod()[None]]) * rewards).sum()


@wrong("7.1", *TREE)
def survives_its_own_stop(stop, rewards):
    here = (1 - stop).cumprod(0)
    return (here * stop * rewards[:-1]).sum() + here[-1] * rewards[-1]


@wrong("7.1", *TREE)
def forward_like_a_recurrence(stop, rewards):
    value = rewards[0]
    for d, p in enumerate(stop):
        value = p * value + (1 - p) * rewards[d + 1]
    return value


@wrong("7.1", *SURE)
def survival_by_logs(stop, rewards):
    logs = F.pad(torch.log1p(-stop).cumsum(0), (1, 0))
    return (logs.exp() * F.pad(stop, (0, 1), value=1.0) * rewards).sum()


@wrong("7.1", *SURE)
def survival_by_division(stop, rewards):
    here = F.pad((1 - stop).cumprod(0), (1, 0), value=1.0)
    ends = torch.cat([here[1:] / (1 - stop) * stop, here[-1:]])
    return (ends * rewards).sum()


@wrong("7.1", *TREE)
def constant_survival(stop, rewards):
    with torch.no_grad():
        here = F.pad((1 - stop).cumprod(0), (1, 0), value=1.0)
    return (here * F.pad(stop, (0, 1), value=1.0) * rewards).sum()


@wrong("7.1", *TREE)
def simulated(stop, rewards):
    stops = torch.rand(4000, len(stop)) < stop
    ends = torch.where(stops.any(1), stops.int().argmax(1), len(stop))
    return rewards[ends].mean()


@wrong("7.1", *TREE)
def pays_at_every_total(stop, rewards):
    return (F.pad((1 - stop).cumprod(0), (1, 0), value=1.0) * rewards).sum()


@wrong("7.1", *LONE)
def squeezed(stop, rewards):
    p = stop.squeeze()
    here = torch.cat([p.new_ones(1), (1 - p).cumprod(-1)])
    return (here * F.pad(p, (0, 1), value=1.0) * rewards).sum()


@wrong("7.1", *TREE)
def as_a_number(stop, rewards):
    value = rewards[-1].item()
    for p, reward in reversed([*zip(stop.tolist(), rewards.tolist())]):
        value = p * reward + (1 - p) * value
    return value


@right("7.1")
def by_recursion(stop, rewards):
    if len(stop) == 0:
        return rewards[0]
    return stop[0] * rewards[0] + (1 - stop[0]) * by_recursion(stop[1:], rewards[1:])


@right("7.1")
def what_each_total_adds(stop, rewards):
    """The first reward, and for each further total what it adds, if it's written."""
    return rewards[0] + ((1 - stop).cumprod(0) * rewards.diff()).sum()


@right("7.1")
def filled_one_by_one(stop, rewards):
    """In torch's usual number type, which has to be that of the cases."""
    p = torch.zeros(len(rewards))
    here = 1.0
    for d in range(len(stop)):
        p[d] = here * stop[d]
        here = here * (1 - stop[d])
    p[-1] = here
    return p @ rewards


@right("7.1")
def as_a_matrix_power(stop, rewards):
    D = len(stop)
    move = torch.diag(1 - stop, 1)
    here = torch.eye(D + 1, dtype=stop.dtype)[0]
    total = torch.zeros((), dtype=stop.dtype)
    for d in range(D):
        total = total + here[d] * stop[d] * rewards[d]
        here = here @ move
    return total + here[D] * rewards[D]


PROBS = torch.tensor([[0.9, 0.2, 0.5], [0.6, 0.99, 0.05]])
PAIR, THREE = torch.tensor([1.0, -2.0]), torch.tensor([[1, 1, 1], [1, 1, 0]])
MOVES = PROBS, PAIR, THREE
GAPS = PROBS, PAIR, torch.tensor([[0, 1, 1], [1, 0, 1]])
CALM = PROBS, torch.tensor([0.0, 1.0]), THREE
SQUARE = PROBS[:, :2], PAIR, THREE[:, :2]
COLUMN = PROBS[:, :1], PAIR, THREE[:, :1]


@wrong("7.2", *MOVES)
def likely_tokens_move(probs, advantages, mask):
    return (probs * advantages[:, None]).masked_fill(mask == 0, 0.0) / mask.sum()


@wrong("7.2", *MOVES)
def all_move_alike(probs, advantages, mask):
    return torch.where(mask.bool(), advantages[:, None].expand_as(probs), 0.0) / mask.sum()


@wrong("7.2", *MOVES)
def slope_of_the_sigmoid(probs, advantages, mask):
    push = advantages[:, None] * probs * (1 - probs)
    return push.masked_fill(~mask.bool(), 0.0) / mask.sum()


@wrong("7.2", *MOVES)
def downhill(probs, advantages, mask):
    return torch.where(mask.bool(), (probs - 1) * advantages[:, None], 0.0) / mask.sum()


@wrong("7.2", *GAPS)
def ones_come_first(probs, advantages, mask):
    real = torch.arange(probs.shape[1]) < mask.sum(1, keepdim=True)
    return torch.where(real, (1 - probs) * advantages[:, None], 0.0) / real.sum()


@wrong("7.2", *MOVES)
def each_row_by_its_length(probs, advantages, mask):
    push = torch.where(mask.bool(), (1 - probs) * advantages[:, None], 0.0)
    return push / mask.sum(1, keepdim=True)


@wrong("7.2", *CALM)
def calm_rows_do_not_count(probs, advantages, mask):
    real = mask.bool() & (advantages != 0)[:, None]
    return torch.where(real, (1 - probs) * advantages[:, None], 0.0) / real.sum()


@wrong("7.2", *SQUARE)
def advantages_along_the_tokens(probs, advantages, mask):
    return torch.where(mask.bool(), (1 - probs) * advantages, 0.0) / mask.sum()


@wrong("7.2", *MOVES)
def mean_of_numpy(probs, advantages, mask):
    push = (1 - probs) * advantages[:, None] * mask
    return push / np.prod(mask.shape)


@wrong("7.2", *COLUMN)
def column_lost(probs, advantages, mask):
    push = torch.where(mask.bool(), (1 - probs) * advantages[:, None], 0.0)
    return push.squeeze(-1) / mask.sum()


@wrong("7.2", *MOVES)
def into_the_probs(probs, advantages, mask):
    probs.neg_().add_(1).mul_(advantages[:, None])
    return probs.masked_fill(mask == 0, 0.0) / mask.sum()


@right("7.2")
def of_real_tokens_alone(probs, advantages, mask):
    rows, places = mask.nonzero(as_tuple=True)
    out = torch.zeros_like(probs)
    out[rows, places] = advantages[rows] * (1 - probs[rows, places]) / len(rows)
    return out


@right("7.2")
def complement_of_the_rest(probs, advantages, mask):
    rest = 1 - probs.masked_fill(mask == 0, 1.0)
    return rest * (advantages / (mask != 0).sum()).unsqueeze(-1)


@right("7.2")
def cleaned_up_afterwards(probs, advantages, mask):
    """It would hide a NaN of a real token, but a probability is none: within the contract it's
    right."""
    return torch.nan_to_num(advantages[:, None] * (1 - probs) * mask) / mask.sum()


@right("7.2")
def with_a_jacobian(probs, advantages, mask):
    total, out = mask.sum(), []
    for row, A, real in zip(probs, advantages, mask.tolist()):
        pushes = []
        for p, counts in zip(row, real):
            pair = torch.stack([p, 1 - p]).log()
            slope = torch.func.jacrev(lambda z: z.log_softmax(-1)[0])(pair)[0]
            pushes.append(slope * A if counts else torch.zeros_like(A))
        out.append(torch.stack(pushes))
    return torch.stack(out) / total


RATIO = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.1, 1.5], [0.9, 1.25, 0.7]])
SIGNS = torch.tensor([1.0, -2.0, 0.5])
HOLES = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 0]])
PUSH = RATIO, SIGNS, HOLES, (0.2, 0.3)


def clipped(ratio, A, low, high):
    return ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))


@wrong("7.3", *PUSH)
def with_respect_to_the_ratio(ratio, advantages, mask, clip):
    A, real = advantages[:, None].expand_as(ratio), mask.bool()
    return torch.where(real & ~clipped(ratio, A, *clip), A, 0.0) / real.sum()


@wrong("7.3", *PUSH)
def cut_on_both_sides(ratio, advantages, mask, clip):
    inside = (ratio >= 1 - clip[0]) & (ratio <= 1 + clip[1]) & mask.bool()
    return torch.where(inside, ratio * advantages[:, None], 0.0) / mask.bool().sum()


@wrong("7.3", *PUSH)
def mean_of_row_means(ratio, advantages, mask, clip):
    A, real = advantages[:, None], mask.bool()
    weights = torch.where(real & ~clipped(ratio, A, *clip), ratio * A, 0.0)
    return weights / real.sum(dim=1, keepdim=True).clamp(min=1) / len(ratio)


@wrong("7.3", *PUSH)
def advantages_of_columns(ratio, advantages, mask, clip):
    real = mask.bool()
    passes = real & ~clipped(ratio, advantages[:, None], *clip)
    return torch.where(passes, ratio * advantages, 0.0) / real.sum()


@wrong("7.3", *PUSH)
def one_bound_for_both(ratio, advantages, mask, clip):
    A, real = advantages[:, None], mask.bool()
    enough = clipped(ratio, A, clip[0], clip[0])
    return torch.where(real & ~enough, ratio * A, 0.0) / real.sum()


@wrong("7.3", *PUSH[:3], (1.5, 0.2))
def bounds_as_logs(ratio, advantages, mask, clip):
    A, real, log_ratio = advantages[:, None], mask.bool(), ratio.log()
    low, high = math.log(1 - clip[0]), math.log(1 + clip[1])
    enough = ((A > 0) & (log_ratio > high)) | ((A < 0) & (log_ratio < low))
    return torch.where(real & ~enough, ratio * A, 0.0) / real.sum()


@wrong("7.3", *PUSH)
def mean_of_those_let_through(ratio, advantages, mask, clip):
    A = advantages[:, None]
    passes = mask.bool() & ~clipped(ratio, A, *clip)
    return torch.where(passes, ratio * A, 0.0) / passes.sum().clamp(min=1)


@wrong("7.3", *PUSH)
def lengths_of_the_mask(ratio, advantages, mask, clip):
    A, lengths = advantages[:, None], mask.long().sum(dim=1, keepdim=True)
    real = torch.arange(ratio.shape[1]) < lengths
    return torch.where(real & ~clipped(ratio, A, *clip), ratio * A, 0.0) / lengths.sum()


@wrong("7.3", *PUSH[:2], HOLES.float(), PUSH[3])
def mask_and_bits(ratio, advantages, mask, clip):
    A = advantages[:, None]
    passes = (mask & ~clipped(ratio, A, *clip)).bool()
    return torch.where(passes, ratio * A, 0.0) / mask.sum()


@right("7.3")
def token_by_token(ratio, advantages, mask, clip):
    out, n = torch.zeros_like(ratio), mask.bool().sum().item()
    for i, t in mask.nonzero().tolist():
        r, a = ratio[i, t].item(), advantages[i].item()
        cut = r > 1 + clip[1] if a > 0 else r < 1 - clip[0]
        out[i, t] = 0.0 if cut else r * a / n
    return out


@right("7.3")
def where_the_minimum_is_the_first(ratio, advantages, mask, clip):
    A = advantages.unsqueeze(1)
    first, second = ratio * A, ratio.clamp(1 - clip[0], 1 + clip[1]) * A
    passes = torch.logical_and(mask != 0, first <= second)
    return first.masked_fill(~passes, 0.0).div(mask.count_nonzero())


@right("7.3")
def with_numpy(ratio, advantages, mask, clip):
    r, real = ratio.numpy(), mask.numpy().astype(bool)
    a = np.broadcast_to(advantages.numpy()[:, None], r.shape)
    passes = real & np.where(a > 0, r <= 1 + clip[1], r >= 1 - clip[0])
    out = np.zeros_like(r)
    out[passes] = r[passes] * a[passes] / real.sum()
    return torch.from_numpy(out)


BINARY = torch.tensor([1.0, 1, 1, 0, 0, 1, 0, 0, 0]), 3
EQUAL = torch.tensor([2.0, 2, 2, -1, -1, 0]), 3


def spread(differ, group_size):
    return differ.repeat_interleave(group_size)


@wrong("7.4", *BINARY)
def tiled(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups.amax(dim=1) != groups.amin(dim=1)).repeat(group_size)


@wrong("7.4", *EQUAL)
def some_but_not_all_right(rewards, group_size):
    right_ones = rewards.view(-1, group_size).sum(dim=1)
    return spread((right_ones > 0) & (right_ones < group_size), group_size)


@wrong("7.4", *EQUAL)
def groups_stand_in_columns(rewards, group_size):
    groups = rewards.view(group_size, -1)
    return spread(groups.amax(dim=0) != groups.amin(dim=0), group_size)


@wrong("7.4", torch.tensor([0.0, 1, 0, 1, 1, 1]), 3)
def first_and_last(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return spread(groups[:, 0] != groups[:, -1], group_size)


@wrong("7.4", *BINARY)
def rows_unlike_the_first(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups != groups[:, :1]).flatten()


@right("7.4")
def with_sets(rewards, group_size):
    values, stays = rewards.tolist(), []
    for start in range(0, len(values), group_size):
        stays += [len(set(values[start : start + group_size])) > 1] * group_size
    return torch.tensor(stays)


@right("7.4")
def any_unlike_the_first(rewards, group_size):
    groups = rewards.reshape(-1, group_size)
    return (groups != groups[:, [0]]).any(1, keepdim=True).expand_as(groups).flatten()


@right("7.4")
def sorted_ends(rewards, group_size):
    ordered = torch.stack([group.sort().values for group in rewards.split(group_size)])
    differ = ordered[:, 0] < ordered[:, -1]
    return differ[torch.arange(len(rewards)) // group_size]
