"""Answers to the exercises of notebook 07."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong
from torch import nn

from minigrpo.objective import grpo_loss


class Bigram(torch.Tensor):  # a table that can be called: the judge wants its gradient
    """The next token from the last one, and from how much is visible."""

    at_padding = 0.0  # the logit of token 2 there

    def __call__(self, input_ids, attention_mask=None):
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        table = self.as_subclass(torch.Tensor)
        logits = table[input_ids] * (1 + 0.1 * seen.cumsum(dim=1))[..., None]
        nonsense = torch.tensor([0, 0, self.at_padding, 0, 0])
        return SimpleNamespace(logits=torch.where(seen[..., None] > 0, logits, nonsense))


class Broken(Bigram):
    at_padding = -math.inf


TABLE = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double)
IDS = torch.tensor([[2, 2, 1, 0, 3, 2], [4, 3, 0, 2, 2, 2], [2, 1, 4, 0, 4, 0]])
SEEN = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
PLAIN = TABLE.as_subclass(Bigram), IDS, SEEN, 3
BROKEN = TABLE.as_subclass(Broken), IDS, SEEN, 3
ONE = TABLE.as_subclass(Bigram), IDS[2:], SEEN[2:], 3
STEEP = (100 * TABLE).as_subclass(Bigram), IDS, SEEN, 3
HIGH = (1000 + TABLE).as_subclass(Bigram), IDS, SEEN, 3


def look(policy, input_ids, attention_mask, width):
    logits = policy(input_ids, attention_mask=attention_mask).logits[:, -width - 1 : -1]
    return logits, input_ids[:, -width:], attention_mask[:, -width:].bool()


def pick(log_p, tokens):
    return log_p.gather(-1, tokens[..., None]).squeeze(-1)


@wrong("7.1", *PLAIN)
def not_shifted(policy, input_ids, attention_mask, width):
    log_p = policy(input_ids, attention_mask=attention_mask).logits[:, -width:].log_softmax(-1)
    chosen = log_p.gather(-1, input_ids[:, -width:, None]).squeeze(-1)
    return torch.where(attention_mask[:, -width:].bool(), chosen, 0.0)


@wrong("7.1", *BROKEN)
def times_the_mask(policy, input_ids, attention_mask, width):
    logits, tokens, real = look(policy, input_ids, attention_mask, width)
    return pick(logits.log_softmax(-1), tokens) * real


@wrong("7.1", *PLAIN)
def without_attention_mask(policy, input_ids, attention_mask, width):
    logits = policy(input_ids).logits[:, -width - 1 : -1]
    chosen = pick(logits.log_softmax(-1), input_ids[:, -width:])
    return chosen.masked_fill(attention_mask[:, -width:] == 0, 0.0)


@wrong("7.1", *PLAIN)
def mask_not_shifted(policy, input_ids, attention_mask, width):
    logits, tokens, _ = look(policy, input_ids, attention_mask, width)
    real = attention_mask[:, :-1][:, -width:].bool()
    return torch.where(real, pick(logits.log_softmax(-1), tokens), 0.0)


@wrong("7.1", *PLAIN)
@torch.no_grad()
def scored_like_a_sampler(policy, input_ids, attention_mask, width):
    logits, tokens, real = look(policy, input_ids, attention_mask, width)
    return torch.where(real, pick(logits.log_softmax(-1), tokens), 0.0)


@wrong("7.1", *STEEP)
def log_of_softmax_and_eps(policy, input_ids, attention_mask, width):
    logits, tokens, real = look(policy, input_ids, attention_mask, width)
    return torch.where(real, (pick(logits.softmax(-1), tokens) + 1e-12).log(), 0.0)


@wrong("7.1", *PLAIN)
def zero_is_ignored(policy, input_ids, attention_mask, width):
    logits, tokens, real = look(policy, input_ids, attention_mask, width)
    tokens = tokens.masked_fill(~real, 0)
    return -F.cross_entropy(logits.mT, tokens, ignore_index=0, reduction="none")


@wrong("7.1", *ONE)
def squeezed_everywhere(policy, input_ids, attention_mask, width):
    logits, tokens, real = look(policy, input_ids, attention_mask, width)
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze()
    return torch.where(real.squeeze(), chosen, 0.0)


@wrong("7.1", *STEEP)
def not_below_a_hundred(policy, input_ids, attention_mask, width):
    logits, tokens, real = look(policy, input_ids, attention_mask, width)
    return torch.where(real, pick(logits.log_softmax(-1), tokens).clamp(min=-100), 0.0)


@right("7.1")
def real_places_alone(policy, input_ids, attention_mask, width):
    logits, tokens, real = look(policy, input_ids, attention_mask, width)
    out = logits.new_zeros(tokens.shape)
    out[real] = -F.cross_entropy(logits[real], tokens[real], reduction="none")
    return out


@right("7.1")
def with_logsumexp(policy, input_ids, attention_mask, width):
    logits, tokens, real = look(policy, input_ids, attention_mask, width)
    return (pick(logits, tokens) - logits.logsumexp(dim=-1)).masked_fill(~real, 0.0)


@right("7.1")
def column_by_column(policy, input_ids, attention_mask, width):
    logits, columns = policy(input_ids, attention_mask=attention_mask).logits, []
    rows, S = torch.arange(len(input_ids)), input_ids.shape[1]
    for s in range(S - width, S):
        chosen = F.log_softmax(logits[:, s - 1], dim=-1)[rows, input_ids[:, s]]
        columns.append(torch.where(attention_mask[:, s] != 0, chosen, torch.zeros_like(chosen)))
    return torch.stack(columns, dim=1)


def starter(kind=torch.optim.SGD, **settings):
    def start():
        weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.double).view(2, 3))
        return lambda: F.logsigmoid(weight), kind([weight], **settings)

    return start


OLD = F.logsigmoid(torch.linspace(-1, 1, 6, dtype=torch.double).view(2, 3))
PAIR, TOKENS = torch.tensor([1.0, -1.0]).double(), torch.tensor([[1, 1, 1], [1, 1, 0]])
TWO = starter(lr=0.1), OLD, PAIR, TOKENS, 2
STRONG = starter(lr=0.1), OLD, 20 * PAIR, TOKENS, 2
ADAM = starter(torch.optim.Adam, lr=0.01), OLD, PAIR, TOKENS, 3
EMPTY = starter(lr=0.1), OLD, PAIR, TOKENS * torch.tensor([[1], [0]]), 2


def update(score, optimizer, *batch):
    optimizer.zero_grad()
    loss, _ = grpo_loss(score(), *batch)
    loss.backward()
    optimizer.step()


@wrong("7.2", *TWO)
def scored_once(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    log_probs = score()
    for _ in range(epochs):
        update(lambda: log_probs + 0.0, optimizer, old_log_probs, advantages, mask)
    return score().detach()


@wrong("7.2", *TWO)
def gradients_pile_up(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        grpo_loss(score(), old_log_probs, advantages, mask)[0].backward()
        optimizer.step()
    return score().detach()


@wrong("7.2", *TWO)
def before_the_last_step(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        log_probs = score()
        update(lambda new=log_probs: new, optimizer, old_log_probs, advantages, mask)
    return log_probs.detach()


@wrong("7.2", *STRONG)
def old_moves_along(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        update(score, optimizer, old_log_probs, advantages, mask)
        old_log_probs = score().detach()
    return old_log_probs


@wrong("7.2", *TWO)
def padding_is_zero(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        update(score, optimizer, old_log_probs, advantages, mask)
    return torch.where(mask.bool(), score().detach(), 0.0)


@wrong("7.2", *STRONG)
def gradient_norm_clipped(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        optimizer.zero_grad()
        grpo_loss(score(), old_log_probs, advantages, mask)[0].backward()
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
    return score().detach()


@wrong("7.2", *ADAM)
def steps_by_hand(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    groups = [(p, group["lr"]) for group in optimizer.param_groups for p in group["params"]]
    for _ in range(epochs):
        optimizer.zero_grad()
        grpo_loss(score(), old_log_probs, advantages, mask)[0].backward()
        for p, lr in groups:
            p.data -= lr * p.grad
    return score().detach()


@wrong("7.2", *EMPTY)
def without_empty_rows(start, old_log_probs, advantages, mask, epochs):
    (score, optimizer), keep = start(), mask.bool().any(dim=1)
    for _ in range(epochs):
        batch = old_log_probs[keep], advantages[keep], mask[keep]
        update(lambda: score()[keep], optimizer, *batch)
    return score().detach()


@wrong("7.2", *TWO)
def graph_kept(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        update(score, optimizer, old_log_probs, advantages, mask)
    return score()


@wrong("7.2", *TWO[:3], torch.ones(2, 3), 2)
def stops_at_loss_zero(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        if grpo_loss(score(), old_log_probs, advantages, mask)[0].abs() < 1e-8:
            break
        update(score, optimizer, old_log_probs, advantages, mask)
    return score().detach()


@right("7.2")
def with_a_helper(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    while epochs > 0:
        update(score, optimizer, old_log_probs, advantages, mask)
        epochs -= 1
    with torch.no_grad():
        return score()


@right("7.2")
def by_recursion(start, old_log_probs, advantages, mask, epochs):
    def rest(score, optimizer, n):
        if n == 0:
            return score().detach().clone()
        update(score, optimizer, old_log_probs, advantages, mask)
        return rest(score, optimizer, n - 1)

    return rest(*start(), epochs)


@right("7.2")
def by_keyword(start, old_log_probs, advantages, mask, epochs):
    score, opt = start()
    for _epoch in range(epochs):
        loss = grpo_loss(score(), old_log_probs, advantages, completion_mask=mask)[0]
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    return score().data


RATIO = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.1, 1.5], [0.9, 1.25, 0.7]], dtype=torch.double)
SIGNS = torch.tensor([1.0, -2.0, 0.5]).double()
HOLES = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 0]])
PUSH = RATIO, SIGNS, HOLES, (0.2, 0.3)
GARBAGE = RATIO.masked_fill(HOLES == 0, math.nan), *PUSH[1:]


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


@wrong("7.3", *GARBAGE)
def garbage_times_zero(ratio, advantages, mask, clip):
    A, real = advantages[:, None], mask.bool()
    return ratio * A * (real & ~clipped(ratio, A, *clip)) / real.sum()


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


@wrong("7.3", *PUSH[:2], HOLES.double(), PUSH[3])
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


BINARY = torch.tensor([1.0, 1, 1, 0, 0, 1, 0, 0, 0], dtype=torch.double), 3
TINY = torch.tensor([0.0, 1e-200, 0, 1, 1, 1], dtype=torch.double), 3
CLOSE = torch.tensor([3.0, 3 + 1e-12, 3, 1, 1, 1], dtype=torch.double), 3
EQUAL = torch.tensor([2.0, 2, 2, -1, -1, 0], dtype=torch.double), 3


def spread(differ, group_size):
    return differ.repeat_interleave(group_size)


@wrong("7.4", *BINARY)
def tiled(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups.amax(dim=1) != groups.amin(dim=1)).repeat(group_size)


@wrong("7.4", *TINY)
def std_above_zero(rewards, group_size):
    return spread(rewards.view(-1, group_size).std(dim=1) > 0, group_size)


@wrong("7.4", *EQUAL)
def some_but_not_all_right(rewards, group_size):
    right_ones = rewards.view(-1, group_size).sum(dim=1)
    return spread((right_ones > 0) & (right_ones < group_size), group_size)


@wrong("7.4", *CLOSE)
def is_close(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return spread(~torch.isclose(groups.amax(dim=1), groups.amin(dim=1)), group_size)


@wrong("7.4", *EQUAL)
def groups_stand_in_columns(rewards, group_size):
    groups = rewards.view(group_size, -1)
    return spread(groups.amax(dim=0) != groups.amin(dim=0), group_size)


@wrong("7.4", torch.tensor([0.0, 1, 0, 1, 1, 1]).double(), 3)
def first_and_last(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return spread(groups[:, 0] != groups[:, -1], group_size)


@wrong("7.4", torch.full((3,), 0.1, dtype=torch.double), 3)
def unlike_the_mean(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return spread((groups - groups.mean(dim=1, keepdim=True)).ne(0).any(dim=1), group_size)


@wrong("7.4", *BINARY)
def rows_unlike_the_first(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups != groups[:, :1]).flatten()


@wrong("7.4", *CLOSE)
def as_floats(rewards, group_size):
    groups = rewards.float().view(-1, group_size)
    return spread(groups.amax(dim=1) != groups.amin(dim=1), group_size)


@wrong("7.4", *CLOSE)
def variance_of_moments(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return spread(groups.square().mean(dim=1) > groups.mean(dim=1).square() + 1e-9, group_size)


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


@wrong("7.1", *PLAIN)
def first_columns(policy, input_ids, attention_mask, width):
    log_p = policy(input_ids, attention_mask=attention_mask).logits[:, :width].log_softmax(-1)
    chosen = log_p.gather(-1, input_ids[:, 1 : width + 1, None]).squeeze(-1)
    return torch.where(attention_mask[:, :width].bool(), chosen, 0.0)
