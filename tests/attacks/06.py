"""Answers to the exercises of notebook 06."""

from __future__ import annotations

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from attack import right, wrong
from torch import nn

from minigrpo.objective import clipped_surrogate, equal_groups, grpo_loss

INF, NAN = float("inf"), float("nan")


class Policy(torch.Tensor):
    """A table (V, V) to be called: its logits sum what the real tokens so far say."""

    never = None  # a token that it does not write

    def __call__(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        table = self.as_subclass(torch.Tensor)
        logits = (table[input_ids] * attention_mask[..., None]).cumsum(dim=1)
        if self.never is not None:
            logits = logits.index_fill(-1, torch.tensor([self.never]), -INF)
        return SimpleNamespace(logits=logits)


class NeverPads(Policy):
    never = 6


TABLE = torch.randn(7, 7, generator=torch.Generator().manual_seed(0)).double()
POLICY = TABLE.as_subclass(Policy)
IDS = torch.tensor([[6, 6, 1, 2, 3, 4, 5], [1, 0, 2, 4, 0, 6, 6], [6, 3, 5, 1, 6, 6, 6]])
REAL = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0, 0]])
USUAL = POLICY, IDS, REAL, 3
NEVER_PAD = TABLE.as_subclass(NeverPads), IDS, REAL, 3
SHARP = (TABLE * 400).as_subclass(Policy), IDS, REAL, 3
ONE_ROW = POLICY, IDS[:1], REAL[:1], 4


def shifted(policy, input_ids, attention_mask):
    logits = policy(input_ids, attention_mask=attention_mask).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


@wrong("6.1", *USUAL)
def own_position(policy, input_ids, attention_mask, width):
    log_p = policy(input_ids, attention_mask=attention_mask).logits.log_softmax(-1)
    chosen = log_p.gather(-1, input_ids[..., None])[..., 0][:, -width:]
    return torch.where(attention_mask[:, -width:].bool(), chosen, 0.0)


@wrong("6.1", *USUAL)
def policy_without_mask(policy, input_ids, attention_mask, width):
    log_p = policy(input_ids).logits[:, -width - 1 : -1].log_softmax(-1)
    chosen = log_p.gather(-1, input_ids[:, -width:, None])[..., 0]
    return torch.where(attention_mask[:, -width:].bool(), chosen, 0.0)


@wrong("6.1", *NEVER_PAD)
def times_mask(policy, input_ids, attention_mask, width):
    return (shifted(policy, input_ids, attention_mask) * attention_mask[:, 1:])[:, -width:]


@wrong("6.1", *USUAL)
def mask_of_the_predicting_column(policy, input_ids, attention_mask, width):
    chosen = shifted(policy, input_ids, attention_mask)
    return torch.where(attention_mask[:, :-1].bool(), chosen, 0.0)[:, -width:]


@wrong("6.1", *USUAL)
def padding_by_last_id(policy, input_ids, attention_mask, width):
    chosen = shifted(policy, input_ids, attention_mask)[:, -width:]
    return torch.where(input_ids[:, -width:] != 0, chosen, 0.0)


@wrong("6.1", *SHARP)
def log_of_softmax(policy, input_ids, attention_mask, width):
    p = policy(input_ids, attention_mask=attention_mask).logits[:, -width - 1 : -1].softmax(-1)
    chosen = p.gather(-1, input_ids[:, -width:, None])[..., 0].clamp(min=1e-12).log()
    return torch.where(attention_mask[:, -width:].bool(), chosen, 0.0)


@wrong("6.1", *USUAL)
def normalizer_without_gradient(policy, input_ids, attention_mask, width):
    logits = policy(input_ids, attention_mask=attention_mask).logits[:, -width - 1 : -1]
    chosen = logits.gather(-1, input_ids[:, -width:, None])[..., 0]
    chosen = chosen - logits.detach().logsumexp(-1)
    return torch.where(attention_mask[:, -width:].bool(), chosen, 0.0)


@wrong("6.1", *USUAL)
def only_the_end_is_read(policy, input_ids, attention_mask, width):
    ids, mask = input_ids[:, -width - 1 :], attention_mask[:, -width - 1 :]
    return torch.where(mask[:, 1:].bool(), shifted(policy, ids, mask), 0.0)


@wrong("6.1", *ONE_ROW)
def squeezed(policy, input_ids, attention_mask, width):
    log_p = policy(input_ids, attention_mask=attention_mask).logits[:, :-1].log_softmax(-1)
    chosen = log_p.gather(-1, input_ids[:, 1:, None]).squeeze()[..., -width:]
    return torch.where(attention_mask[:, -width:].bool().squeeze(), chosen, 0.0)


@wrong("6.1", POLICY, IDS, REAL.bool(), 3)
def one_minus_mask(policy, input_ids, attention_mask, width):
    chosen = shifted(policy, input_ids, attention_mask)
    return chosen.masked_fill((1 - attention_mask[:, 1:]).bool(), 0.0)[:, -width:]


@wrong("6.1", *USUAL)
def inverted_int_mask(policy, input_ids, attention_mask, width):
    chosen = shifted(policy, input_ids, attention_mask)
    return chosen.masked_fill((~attention_mask[:, 1:]).bool(), 0.0)[:, -width:]


@wrong("6.1", *USUAL)
def lengths_of_the_whole_row(policy, input_ids, attention_mask, width):
    chosen = shifted(policy, input_ids, attention_mask)[:, -width:]
    return torch.where(torch.arange(width) < attention_mask.sum(1, keepdim=True), chosen, 0.0)


@wrong("6.1", *USUAL)
def unscored_policy_copy(policy, input_ids, attention_mask, width):
    chosen = shifted(copy.deepcopy(policy), input_ids, attention_mask)[:, -width:]
    return torch.where(attention_mask[:, -width:].bool(), chosen, 0.0)


@wrong("6.1", *SHARP)
def floored_at_minus_100(policy, input_ids, attention_mask, width):
    chosen = shifted(policy, input_ids, attention_mask)[:, -width:].clamp(min=-100)
    return torch.where(attention_mask[:, -width:].bool(), chosen, 0.0)


@right("6.1")
def by_cross_entropy(policy, input_ids, attention_mask, width):
    logits = policy(input_ids, attention_mask=attention_mask).logits[:, -width - 1 : -1]
    labels = input_ids[:, -width:].masked_fill(attention_mask[:, -width:] == 0, -100)
    return -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


@right("6.1")
def completion_lengths(policy, input_ids, attention_mask, width):
    chosen = shifted(policy, input_ids, attention_mask)[:, -width:]
    lengths = attention_mask[:, -width:].sum(dim=-1, keepdim=True)
    return chosen.masked_fill(torch.arange(width) >= lengths, 0.0)


@right("6.1")
def advanced_indexing(policy, input_ids, attention_mask, width):
    N, S = input_ids.shape
    log_p = F.log_softmax(policy(input_ids, attention_mask=attention_mask).logits, dim=-1)
    rows, columns = torch.arange(N)[:, None], torch.arange(S - width, S)
    chosen = log_p[rows, columns - 1, input_ids[rows, columns]]
    return chosen.where(attention_mask[rows, columns] == 1, chosen.new_zeros(()))


@right("6.1")
def filled_in_where_real(policy, input_ids, attention_mask, width):
    logits = policy(input_ids, attention_mask=attention_mask).logits[:, :-1]
    row, column = attention_mask[:, 1:].bool().nonzero(as_tuple=True)
    kept = logits[row, column]
    values = kept[torch.arange(len(row)), input_ids[row, column + 1]] - kept.logsumexp(-1)
    out = values.new_zeros(input_ids.shape[0], input_ids.shape[1] - 1)
    return out.index_put((row, column), values)[:, -width:]


START = torch.tensor([[0.5, -0.3, 1.0], [0.2, 0.9, -0.7], [0.1, 0.4, 0.3]]).double()
OLD = -F.softplus(START + torch.tensor([[0.1, -0.1, 0.05]]))
PLUS_MINUS = torch.tensor([1.5, -1.0, 0.3]).double()
RAGGED = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])


def begin(kind=torch.optim.SGD, **settings):
    def start():
        table, bias = nn.Parameter(START.clone()), nn.Parameter(START[0].clone() * 0)
        groups = [{"params": [table]}, {"params": [bias]}]
        return lambda: -F.softplus(table + bias), kind(groups, **settings)

    return start


PLAIN = begin(lr=0.3), OLD, PLUS_MINUS, RAGGED, 3
MOMENTUM = begin(lr=0.3, momentum=0.9), OLD, PLUS_MINUS, RAGGED, 3
DECAYED = begin(torch.optim.AdamW, lr=0.1, weight_decay=0.5), OLD, PLUS_MINUS * 0, RAGGED, 3
LEVEL = begin(lr=0.3), -F.softplus(START), torch.tensor([1.0, -1, 0]).double(), RAGGED * 0 + 1, 2
STEEP = begin(lr=0.3), OLD, PLUS_MINUS * 40, RAGGED, 2


@wrong("6.2", *PLAIN)
def scored_once(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    loss, _ = grpo_loss(score(), old_log_probs, advantages, mask)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
    return score().detach()


@wrong("6.2", *PLAIN)
def gradients_pile_up(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    optimizer.zero_grad()
    for _ in range(epochs):
        grpo_loss(score(), old_log_probs, advantages, mask)[0].backward()
        optimizer.step()
    return score().detach()


def epoch(score, optimizer, *batch, **settings):
    optimizer.zero_grad()
    loss, _ = grpo_loss(score(), *batch, **settings)
    loss.backward()
    optimizer.step()


@wrong("6.2", *PLAIN)
def old_follows(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        epoch(score, optimizer, old_log_probs, advantages, mask)
        old_log_probs = score().detach()
    return old_log_probs


@wrong("6.2", *PLAIN)
def old_from_the_start(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    old_log_probs = score().detach()
    for _ in range(epochs):
        epoch(score, optimizer, old_log_probs, advantages, mask)
    return score().detach()


@wrong("6.2", *PLAIN)
def scores_before_the_last_step(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        log_probs = score().detach()
        epoch(score, optimizer, old_log_probs, advantages, mask)
    return log_probs


@wrong("6.2", *PLAIN)
def with_graph(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        epoch(score, optimizer, old_log_probs, advantages, mask)
    return score()


@wrong("6.2", *PLAIN)
def padding_zeroed(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        epoch(score, optimizer, old_log_probs, advantages, mask)
    return torch.where(mask.bool(), score().detach(), 0.0)


@wrong("6.2", *PLAIN)
def rows_without_tokens_dropped(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    some = mask.bool().any(dim=1)
    batch = old_log_probs[some], advantages[some], mask[some]
    for _ in range(epochs):
        epoch(lambda: score()[some], optimizer, *batch)
    return score().detach()


@wrong("6.2", *MOMENTUM)
def steps_by_hand(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        optimizer.zero_grad()
        grpo_loss(score(), old_log_probs, advantages, mask)[0].backward()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad
    return score().detach()


@wrong("6.2", *LEVEL)
def stops_at_loss_zero(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        loss, _ = grpo_loss(score(), old_log_probs, advantages, mask)
        if abs(loss.item()) < 1e-12:
            break
        epoch(score, optimizer, old_log_probs, advantages, mask)
    return score().detach()


@wrong("6.2", *DECAYED)
def nothing_to_learn(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs if advantages.any() else 0):
        epoch(score, optimizer, old_log_probs, advantages, mask)
    return score().detach()


@wrong("6.2", *STEEP)
def gradient_norm_clipped(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        optimizer.zero_grad()
        grpo_loss(score(), old_log_probs, advantages, mask)[0].backward()
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
    return score().detach()


@wrong("6.2", *PLAIN)
def loss_over_epochs(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in range(epochs):
        optimizer.zero_grad()
        (grpo_loss(score(), old_log_probs, advantages, mask)[0] / epochs).backward()
        optimizer.step()
    return score().detach()


@wrong("6.2", *MOMENTUM)
def fresh_start_each_epoch(start, old_log_probs, advantages, mask, epochs):
    for _ in range(epochs):
        score, optimizer = start()
        epoch(score, optimizer, old_log_probs, advantages, mask)
    return score().detach()


@right("6.2")
def zeroed_after_the_step(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    for _ in itertools.repeat(None, epochs):
        grpo_loss(score(), old_log_probs, advantages, mask)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return score().clone()


@right("6.2")
def trimmed_columns(start, old_log_probs, advantages, mask, epochs):
    score, optimizer = start()
    T = max(1, int(mask.sum(dim=1).max()))
    for _ in range(epochs):
        epoch(lambda: score()[:, :T], optimizer, old_log_probs[:, :T], advantages, mask[:, :T])
    return score().detach()


@right("6.2")
def recursive(start, old_log_probs, advantages, mask, epochs):
    if not isinstance(start, tuple):
        start = start()
    if epochs == 0:
        return start[0]().detach()
    epoch(*start, old_log_probs, advantages, mask)
    return recursive(start, old_log_probs, advantages, mask, epochs - 1)


@right("6.2")
def while_loop(start, old_log_probs, advantages, mask, epochs):
    (new, adam), left = start(), epochs
    while left > 0:
        adam.zero_grad(set_to_none=True)
        out = grpo_loss(new(), old_log_probs.detach(), advantages, completion_mask=mask.bool())
        torch.autograd.backward(out[0])
        adam.step()
        left -= 1
    return new().detach().clone()


RATIO = torch.tensor([[1.0, 1.5, 0.5, 1.1], [0.6, 1.4, 0.95, 2.0], [1.0, 3.5, 0.2, 1.0]]).double()
A3 = torch.tensor([2.0, -1.5, 0.0]).double()
HOLES = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]])
CLIP = (0.2, 0.3)
PUSH = RATIO, A3, HOLES, CLIP
DIRTY = torch.where(HOLES.bool(), RATIO, torch.tensor(NAN).double()), A3, HOLES, CLIP
ENDLESS = torch.where(HOLES.bool(), RATIO, torch.tensor(INF).double()), A3, HOLES, CLIP
WIDE = RATIO, A3, HOLES, (1.5, 1.2)
ALL_CLIPPED = RATIO + 4, A3.abs(), HOLES, CLIP


@wrong("6.3", *PUSH)
def either_sign_clipped(ratio, advantages, mask, clip):
    inside = (ratio >= 1 - clip[0]) & (ratio <= 1 + clip[1]) & mask.bool()
    return torch.where(inside, ratio * advantages[:, None], 0.0) / mask.bool().sum()


def pushes(ratio, A, clip):
    low, high = clip
    enough = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))
    return torch.where(enough, 0.0, ratio * A)


@wrong("6.3", *PUSH)
def ratio_forgotten(ratio, advantages, mask, clip):
    A = advantages[:, None]
    inside = pushes(ratio, A, clip) != 0
    return torch.where(inside & mask.bool(), A, 0.0) / mask.bool().sum()


@wrong("6.3", *PUSH)
def derivative_by_ratio(ratio, advantages, mask, clip):
    ratio = torch.where(mask.bool(), ratio, 1.0).requires_grad_()
    objective = clipped_surrogate(ratio, advantages[:, None], clip) * mask / mask.sum()
    return torch.autograd.grad(objective.sum(), ratio)[0]


@wrong("6.3", *PUSH)
def clamped_weights(ratio, advantages, mask, clip):
    w = clipped_surrogate(ratio, advantages[:, None], clip)
    return torch.where(mask.bool(), w, 0.0) / mask.bool().sum()


@wrong("6.3", *PUSH)
def mean_of_each_row(ratio, advantages, mask, clip):
    w = torch.where(mask.bool(), pushes(ratio, advantages[:, None], clip), 0.0)
    return w / mask.sum(dim=1, keepdim=True).clamp(min=1) / len(mask)


@wrong("6.3", *PUSH)
def pushed_tokens_counted(ratio, advantages, mask, clip):
    w = torch.where(mask.bool(), pushes(ratio, advantages[:, None], clip), 0.0)
    return w / (w != 0).sum().clamp(min=1)


@wrong("6.3", *ENDLESS)
def nan_to_num_times_mask(ratio, advantages, mask, clip):
    return pushes(ratio.nan_to_num(), advantages[:, None], clip) * mask / mask.sum()


@wrong("6.3", *DIRTY)
def garbage_times_mask(ratio, advantages, mask, clip):
    return pushes(ratio, advantages[:, None], clip) * mask / mask.sum()


@wrong("6.3", *WIDE)
def bounds_in_logs(ratio, advantages, mask, clip):
    A, moved = advantages[:, None], ratio.log()
    low, high = math.log(1 - clip[0]), math.log(1 + clip[1])
    enough = ((A > 0) & (moved > high)) | ((A < 0) & (moved < low)) | (mask == 0)
    return (ratio * A).masked_fill(enough, 0.0) / (mask != 0).sum()


@wrong("6.3", *PUSH)
def int_mask_as_index(ratio, advantages, mask, clip):
    w = torch.zeros_like(ratio)
    w[mask] = pushes(ratio, advantages[:, None], clip)[mask]
    return w / mask.sum()


@wrong("6.3", *PUSH)
def mask_as_lengths(ratio, advantages, mask, clip):
    lengths = mask.sum(dim=1, keepdim=True)
    w = pushes(ratio, advantages[:, None], clip)
    return torch.where(torch.arange(ratio.shape[1]) < lengths, w, 0.0) / lengths.sum()


@wrong("6.3", *PUSH)
def dual_clip(ratio, advantages, mask, clip):
    A = advantages[:, None]
    w = pushes(ratio, A, clip).masked_fill((A < 0) & (ratio > 1 + 3 * clip[1]), 0.0)
    return torch.where(mask.bool(), w, 0.0) / mask.bool().sum()


@wrong("6.3", RATIO[:, :3], A3, HOLES[:, :3].bool(), CLIP)
def advantages_along_columns(ratio, advantages, mask, clip):
    return torch.where(mask.bool(), pushes(ratio, advantages, clip), 0.0) / mask.sum()


@wrong("6.3", RATIO, A3, HOLES.bool(), CLIP)
def batch_of_full_rows(ratio, advantages, mask, clip):
    w = torch.where(mask.bool(), pushes(ratio, advantages[:, None], clip), 0.0)
    return w / (mask.any(dim=1).sum() * mask.shape[1])


@right("6.3")
def autograd_of_log_probs(ratio, advantages, mask, clip):
    real = mask.bool()
    moved = ratio.masked_fill(~real, 1.0).log().requires_grad_()
    J = clipped_surrogate(moved.exp(), advantages[:, None], clip)[real].mean()
    return torch.autograd.grad(J, moved)[0]


@right("6.3")
def token_by_token(ratio, advantages, mask, clip):
    w, tokens = torch.zeros_like(ratio), int((mask != 0).sum())
    for i, j in (mask != 0).nonzero().tolist():
        r, a = ratio[i, j].item(), advantages[i].item()
        if a > 0 and r <= 1 + clip[1] or a < 0 and r >= 1 - clip[0]:
            w[i, j] = r * a / tokens
    return w


@right("6.3")
def by_numpy(ratio, advantages, mask, clip):
    r, A, real = ratio.numpy(), advantages.numpy()[:, None], mask.numpy().astype(bool)
    within = np.where(A > 0, r <= 1 + clip[1], r >= 1 - clip[0])
    return torch.from_numpy(np.where(real & within, np.where(real, r, 0) * A, 0) / real.sum())


@right("6.3")
def real_tokens_alone(ratio, advantages, mask, clip):
    real = mask > 0
    A = advantages[:, None].expand_as(ratio)[real]
    out = torch.zeros_like(ratio)
    out[real] = pushes(ratio[real], A, clip) / real.sum()
    return out


MIXED = torch.tensor([0.0, 1, 0, 2, 2, 2, 3, 3, 2, -1, -1, -1]), 3
SIGNS = torch.tensor([-1.0, 1, 1, -1, 1, 1, 1, 1]), 4
CLOSE = torch.tensor([1.0, 1 + 1e-12, 2, 2], dtype=torch.float64), 2
TINY = torch.tensor([1e-300, 2e-300, 1e-300, 0, 0, 0], dtype=torch.float64), 3
SAME = torch.full((12,), 0.1, dtype=torch.float64), 6
CANCELS = torch.tensor([1.0, -1, 2, 0, 1, 0, 2, 1.0]), 4


@wrong("6.4", *CLOSE)
def std_above_eps(rewards, group_size):
    return (rewards.view(-1, group_size).std(dim=1) > 1e-6).repeat_interleave(group_size)


@wrong("6.4", *TINY)
def std_above_zero(rewards, group_size):
    return (rewards.view(-1, group_size).std(dim=1) > 0).repeat_interleave(group_size)


@wrong("6.4", *MIXED)
def solved_by_some(rewards, group_size):
    share = rewards.view(-1, group_size).mean(dim=1)
    return ((share > 0) & (share < 1)).repeat_interleave(group_size)


@wrong("6.4", *MIXED)
def groups_in_columns(rewards, group_size):
    groups = rewards.view(group_size, -1)
    return (groups.amax(dim=0) != groups.amin(dim=0)).repeat_interleave(group_size)


@wrong("6.4", *MIXED)
def repeated_as_a_block(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups.amax(dim=1) != groups.amin(dim=1)).repeat(group_size)


@wrong("6.4", *MIXED)
def rows_off_the_mean(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups != groups.median(dim=1, keepdim=True).values).flatten()


@wrong("6.4", *SAME)
def any_off_the_mean(rewards, group_size):
    groups = rewards.view(-1, group_size)
    differ = (groups - groups.mean(dim=1, keepdim=True)).abs().amax(dim=1) > 0
    return differ.repeat_interleave(group_size)


@wrong("6.4", *SIGNS)
def without_sign(rewards, group_size):
    groups = rewards.abs().view(-1, group_size)
    return (groups.amax(dim=1) > groups.amin(dim=1)).repeat_interleave(group_size)


@wrong("6.4", *CLOSE)
def is_close(rewards, group_size):
    groups = rewards.view(-1, group_size)
    same = torch.isclose(groups, groups[:, :1]).all(dim=1)
    return (~same).repeat_interleave(group_size)


@wrong("6.4", *CLOSE)
def in_float32(rewards, group_size):
    groups = rewards.float().view(-1, group_size)
    return (groups != groups[:, :1]).any(dim=1).repeat_interleave(group_size)


@wrong("6.4", *MIXED)
def first_against_last(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups[:, 0] != groups[:, -1]).repeat_interleave(group_size)


@wrong("6.4", *MIXED)
def first_row_left_out(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups != groups[:, :1]).flatten()


@wrong("6.4", *CANCELS)
def sum_is_first_times_size(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups.sum(dim=1) != group_size * groups[:, 0]).repeat_interleave(group_size)


@wrong("6.4", torch.tensor([0.25, 0.5, 0.5, 0.75, 1, 1]), 2)
def as_whole_numbers(rewards, group_size):
    groups = rewards.long().view(-1, group_size)
    return (groups.amax(dim=1) != groups.amin(dim=1)).repeat_interleave(group_size)


@right("6.4")
def sets(rewards, group_size):
    values, G = rewards.tolist(), group_size
    return torch.tensor([len(set(values[i // G * G :][:G])) > 1 for i in range(len(values))])


@right("6.4")
def neighbours(rewards, group_size):
    groups = rewards.reshape(-1, group_size)
    differ = groups.diff(dim=1).ne(0).any(dim=1, keepdim=True)
    return differ.expand_as(groups).reshape(-1)


@right("6.4")
def with_the_package(rewards, group_size):
    return ~equal_groups(rewards, group_size).repeat_interleave(group_size)


@right("6.4")
def sorted_chunks(rewards, group_size):
    ends = [chunk.sort().values[[0, -1]] for chunk in rewards.split(group_size)]
    return torch.cat([(low < high).expand(group_size) for low, high in ends])
