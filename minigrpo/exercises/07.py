"""What moves in a training step: the tree of thoughts, single tokens, whole rows"""

import torch

from minigrpo.clinic.catalogue import NAMED
from minigrpo.exercises.form import exercise, mask, numbers, whole
from minigrpo.objective import equal_groups, grpo_loss


@exercise("stop or go on", gradient="stop")
def expected_reward(stop, rewards):
    """stop (D,), rewards (D + 1,) -> scalar (), differentiable in stop"""
    gets_here = torch.cat([stop.new_ones(1), (1 - stop).cumprod(dim=0)])  # (D + 1,)
    stops_here = torch.cat([stop, stop.new_ones(1)])  # after the last decision it's over
    return (gets_here * stops_here * rewards).sum()


expected_reward.why = """A thought ends with d totals if it went on d times and then stopped. If you
weight each reward with stop alone, late stops count as if every thought got that far."""
expected_reward.wrong = {
    "gets_here = torch.cat([torch.ones_like(stop), (1 - stop).prod()[None]])": "A thought has to "
    "get there first. Multiply stop[d] by the 1 - stop of every decision before it.",
    "gets_here = torch.cat([stop.new_ones(1), 1 - stop])": "You count only the decision right "
    "before. A thought goes on at all decisions before d, so take the cumprod.",
    "stops_here = torch.cat([stop, stop.new_zeros(1)])": "The last branch is missing. A thought "
    "that goes on at every decision gets rewards[D].",
    "gets_here = torch.cat([stop.new_ones(1), (1 - stop).cumprod(dim=0)]).detach()": "The value "
    "is correct, but you detach the probability of getting there, which has a gradient too.",
    "gets_here = torch.cat([(go := (1 - stop).cumprod(dim=0)), go[-1:]])": "You multiply by the 1 "
    "- stop of decision d too. Shift the cumprod.",
}
expected_reward.cases = {
    "two decisions": (torch.tensor([0.5, 0.2]), torch.tensor([0.1, 0.3, 1.0])),
    "one decision": (torch.tensor([0.25]), torch.tensor([0.1, 0.9])),
    "one that always stops": (torch.tensor([0.3, 1, 0.2]), torch.tensor([0.1, 0.5, 0.2, 1.0])),
    "600 decisions": (torch.full((600,), 0.005), torch.arange(601) / 300),
}
expected_reward.draw = lambda r: (
    numbers(r, (D := r.randint(1, 5)), low=-0.2, high=1.2).clamp(0, 1),
    numbers(r, D + 1),
)
expected_reward.hints = """
Stopping after exactly two totals has probability (1 - stop[0]) * (1 - stop[1]) * stop[2].
gets_here is torch.cat([stop.new_ones(1), (1 - stop).cumprod(0)]); and after the last it's over."""


def by_autograd(probs, advantages, mask):
    """Each token beside one other, as two logits, through the loss of the package."""
    logit = torch.where(mask.bool(), probs, 0.5).logit().requires_grad_()
    log_probs = torch.nn.functional.logsigmoid(logit)
    loss, _ = grpo_loss(log_probs, None, advantages, mask, how="token_mean")
    return -torch.autograd.grad(loss, logit)[0]


@exercise("which tokens move", package=by_autograd)
def logit_pushes(probs, advantages, mask):
    """probs, mask (N, T), advantages (N,) -> (N, T), 0 where masked"""
    A = advantages[:, None]  # (N, 1): the same for every token of a row
    pushes = torch.where(mask, A * (1 - probs), 0.0)
    return pushes / mask.sum()


LATE = torch.arange(600)[None] >= 343  # the last 257 of 600 tokens


def batch(random, **range):
    """Numbers, advantages and a bool mask; of two rows or more, one can be empty."""
    N, T = random.randint(1, 3), random.randint(1, 4)
    found = mask(random, N, T).bool()
    found[0] *= N == 1 or random.random() < 0.7
    return numbers(random, N, T, **range), whole(random, N, high=9) / 2 - 2, found


logit_pushes.why = """The derivative of a log-prob by its own logit is 1 - p. With the derivative by
the log-prob every token of a row seems to move alike, though the gradient goes to the unexpected
ones."""
logit_pushes.right = [by_autograd]
logit_pushes.wrong = {
    "pushes = torch.where(mask, A.expand_as(probs), 0.0)": "That's the derivative with respect to "
    "the log-prob. It follows its logit with a slope of 1 - p.",
    "pushes = torch.where(mask, A * probs, 0.0)": "You multiply by p, so the tokens that the "
    "policy was sure of move the most. It's 1 - p.",
    "return pushes / mask.numel()": "You count the padding.",
    "return pushes / mask.sum(dim=-1, keepdim=True).clamp(min=1)": "You divide each row by its "
    "own length. In the token mean, all tokens have the same divisor.",
    "return -pushes / mask.sum()": "That's the sign of the loss. An objective goes up.",
    "pushes = torch.where(mask, A * probs * (1 - probs), 0.0)": "That's the slope of p, not of log "
    "p.",
}
square = torch.tensor([[0.9, 0.2], [0.6, 1.0]]), torch.tensor([1.0, -1.5])
logit_pushes.cases = {
    "sure and surprised": (torch.tensor([[0.9, 0.2]]), torch.tensor([1.0]), torch.ones(1, 2) > 0),
    "two rows": (*square, torch.tensor([[True, True], [True, False]])),
    "a long row": (torch.full((1, 600), 0.1), torch.tensor([2.0]), LATE),
}
logit_pushes.garbage = True
logit_pushes.draw = lambda r: batch(r, low=0.01, high=0.99)
logit_pushes.hints = """
log p is a logit minus the logsumexp of all. What's the derivative by that logit?
It's 1 - p. Times advantages[:, None], where the mask is 1, divided by mask.sum()."""


def through_the_loss(ratio, advantages, mask, clip):
    x = torch.where(mask.bool(), ratio, 1.0).log().requires_grad_()
    old = torch.zeros_like(x)
    loss, _ = grpo_loss(x, old, advantages, mask, clip=clip, how="token_mean")
    return -torch.autograd.grad(loss, x)[0]


@exercise("how hard each token is pushed", package=through_the_loss)
def gradient_weights(ratio, advantages, mask, clip):
    """ratio, mask (N, T), advantages (N,), clip (low, high) -> (N, T), 0 where masked"""
    low, high = clip
    A = advantages[:, None]  # (N, 1): the same for every token of a row
    enough = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))
    weights = torch.where(mask & ~enough, ratio * A, 0.0)
    return weights / mask.sum()


gradient_weights.why = """The derivative of a ratio by its log-prob is the ratio itself, so a token
gets ratio times advantage, or 0 if it has gone far enough the way its advantage wants."""
gradient_weights.right = ["enough = ratio * A > ratio.clamp(1 - low, 1 + high) * A"]
gradient_weights.wrong = {
    "enough = (ratio > 1 + high) | (ratio < 1 - low)": "You stop every token outside the bounds. "
    "One that has moved the wrong way (ratio 0.5, a positive advantage) should be brought back.",
    "weights = torch.where(mask, ratio * A, 0.0)": "You don't clip.",
    "weights = torch.where(mask, ratio.clamp(1 - low, 1 + high) * A, 0.0)": "You weight with the "
    "clamped ratio. Where the clip acts, the objective is flat, and its derivative is 0.",
    "weights = torch.where(mask & ~enough, A, 0.0)": "You leave out the ratio. With respect to "
    "the log-prob the derivative is A * ratio.",
    "enough = ratio > 1 + high": "You forget the sign. A bad token has moved enough below 1 - low.",
    "weights = torch.where(mask, (ratio * A).minimum(ratio.clamp(1 - low, 1 + high) * A), 0.0)": (
        "That's the objective itself. Its slope is 0 where it's clipped."
    ),
}
SIGNS, MOVED = torch.tensor([1.0, -1.0]), torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
NEAR = torch.tensor([[1.34, 1.36, 0.7], [0.74, 0.76, 1.2]])
gradient_weights.cases = {
    "a good row and a bad one": (MOVED, SIGNS, torch.ones(2, 3).bool(), (0.2, 0.2)),
    "close to the bounds": (NEAR, SIGNS, torch.arange(6).view(2, 3) < 5, (0.25, 0.35)),
    "a long row": (torch.full((1, 600), 0.9), torch.tensor([2.0]), LATE, (0.2, 0.28)),
}
gradient_weights.garbage = True
gradient_weights.draw = lambda r: (
    *batch(r, low=0.055, high=3),
    (r.choice((0.0, 0.203, 1.5)), r.choice((0.0, 0.203, 0.284))),  # no ratio is at a bound
)
gradient_weights.hints = """
The clip makes the objective flat for tokens that moved far enough the way A wants.
That's ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low)). Elsewhere it's ratio * A."""


def differing(rewards, group_size):
    return ~equal_groups(rewards, group_size).repeat_interleave(group_size)


@exercise("rows that can teach something", package=differing)
def learnable(rewards, group_size):
    """rewards (N,), the first group_size belong to the first prompt, and so on -> (N,) bool"""
    groups = rewards.view(-1, group_size)  # (P, G)
    differ = groups.amax(dim=1) != groups.amin(dim=1)  # (P,)
    return differ.repeat_interleave(group_size)


def equal_or_nearly(random):
    """Groups that are equal, or but for one place; of numbers that float32 holds exactly."""
    G, values = random.randint(2, 6), (0.0, 1.0, 0.5, -1.0, 2.0)
    groups = [[random.choice(values)] * G for _ in range(random.randint(1, 4))]
    for group in groups:
        group[random.randrange(G)] = random.choice((group[0], random.choice(values)))
    return torch.tensor(groups).flatten(), G


learnable.why = """A group can teach something if its largest and smallest reward differ, and then
all of its rows stay. A standard deviation may not be 0 for equal rewards: one group of seven 0.8
gives 6e-8 in float32."""
learnable.right = ["differ = (groups != groups[:, :1]).any(dim=1)"]
learnable.wrong = {
    "return differ": "You return one value per group. Repeat each group_size times.",
    "return differ.repeat(group_size)": "You repeat the whole list of groups. The rows come "
    "prompt by prompt, so use repeat_interleave.",
    "mean = groups.mean(dim=1); differ = (mean > 0) & (mean < 1)": "You ask whether the group's "
    "mean is between 0 and 1. That works for rewards of 0 and 1 only.",
    "return (groups - groups.mean(dim=1, keepdim=True)).abs().gt(1e-4).flatten()": "You ask each "
    "row for its own advantage. A row exactly at the mean still counts, so keep whole groups.",
    "differ = groups.std(dim=1) != 0": "The mean of seven 0.8 is rounded, so their std isn't 0. "
    "Compare them with each other.",
    "groups = rewards.view(group_size, -1)": NAMED["groups_mix_prompts"].sentence,
}
FOURS = [[1.0, 0, 1, 1], [0.5] * 4, [0.5, 1, 0, 0.5], [-1] * 4, [2, -2, -2, 2], [0, 0, 0.01, 0]]
learnable.cases = {
    "right and wrong": (torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]), 3),
    "other rewards": (torch.tensor(FOURS).flatten(), 4),
    "seven rewards of 0.8": (torch.full((7,), 0.8), 7),
}
learnable.draw = equal_or_nearly
learnable.corners = {"close": ((torch.tensor([0, 1e-6]), 2), "A tiny difference counts, too.")}
learnable.hints = """
A group's rewards are all equal if groups.amax(dim=1) is groups.amin(dim=1).
differ has one value per group, and differ.repeat_interleave(group_size) one per row."""
