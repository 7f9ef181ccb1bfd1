"""What moves in a training step: the tree of thoughts, single tokens, whole rows"""

import torch

from minigrpo.exercises.form import exercise, mask, numbers, whole
from minigrpo.objective import equal_groups, grpo_loss


@exercise("stop or go on", gradient="stop")
def expected_reward(stop, rewards):
    """stop (D,), rewards (D + 1,) -> scalar (), differentiable in stop"""
    gets_here = torch.cat([stop.new_ones(1), (1 - stop).cumprod(dim=0)])  # (D + 1,)
    stops_here = torch.cat([stop, stop.new_ones(1)])  # after the last decision it's over
    return (gets_here * stops_here * rewards).sum()


def from_the_end(stop, rewards):
    value = rewards[-1]
    for d in reversed(range(len(stop))):
        value = stop[d] * rewards[d] + (1 - stop[d]) * value
    return value


expected_reward.why = """
A thought ends with d totals if it went on d times and then stopped, so each reward counts with a
product of (1 - stop) times one stop, the last with the product alone. If you weight each reward
with stop alone, late stops count as if every thought got that far."""
expected_reward.right = {
    from_the_end: "go from the last decision back to the first. A decision is worth stop times the "
    "reward here, plus (1 - stop) times what comes after.",
}
expected_reward.wrong = {
    "gets_here = torch.ones_like(rewards)": "You forget that a thought has to get there first. "
    "Multiply stop[d] by the 1 - stop of every decision before it.",
    "gets_here = torch.cat([stop.new_ones(1), 1 - stop])": "You count only the decision right "
    "before. A thought goes on at all d decisions before decision d, so take the cumprod.",
    "stops_here = torch.cat([stop, stop.new_zeros(1)])": "The last branch is missing. A thought "
    "that goes on at every decision ends with D totals, and its reward is rewards[D].",
    (
        "gets_here = torch.cat([stop.new_ones(1), stop.cumprod(dim=0)])",
        "stops_here = torch.cat([1 - stop, stop.new_ones(1)])",
    ): "You've swapped stopping and going on. stop[d] is the probability of stopping.",
    "gets_here = (1 - stop).cumprod(dim=0); gets_here = torch.cat([gets_here, gets_here[-1:]])": (
        "Your product has one factor too many. At decision d it already says that the thought went "
        "on there. Begin it with a 1, because every thought gets to the first decision."
    ),
    "gets_here = torch.cat([stop.new_ones(1), (1 - stop).cumprod(dim=0)]).detach()": "The value is "
    "correct, but you detach the probability of getting there, so the gradient of an early "
    "decision doesn't know what comes after it. Leave it attached.",
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
expected_reward.hints = [
    "How likely is it that a thought stops after exactly two totals? Write it with stop[0], "
    "stop[1] and stop[2].",
    "It goes on twice and then stops, so it's (1 - stop[0]) * (1 - stop[1]) * stop[2]. The "
    "products of 1 - stop are (1 - stop).cumprod(0), with a 1 in front for the first decision.",
    "With gets_here = torch.cat([stop.new_ones(1), (1 - stop).cumprod(0)]) and stops_here = "
    "torch.cat([stop, stop.new_ones(1)]), the result is (gets_here * stops_here * rewards).sum().",
]


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
    real = mask.bool()
    pushes = torch.where(real, A * (1 - probs), 0.0)
    return pushes / real.sum()


LATE = torch.arange(600)[None] >= 343  # the last 257 of 600 tokens
GARBAGE = """Under a 0 of the mask there may be NaN or an infinity, and 0 * NaN is NaN, which ends
up in every sum over the batch. torch.where never looks there, a product with the mask does."""


def batch(random, **range):
    """Numbers, advantages and a mask; of two rows or more, one can be empty."""
    N, T = random.randint(1, 3), random.randint(1, 4)
    found = mask(random, N, T, holes=True)
    found[0] *= N == 1 or random.random() < 0.7
    return numbers(random, N, T, **range), whole(random, N, high=9) / 2 - 2, found


logit_pushes.why = """
The log-prob of a token is its logit minus a logsumexp, and the derivative of that by this logit is
1 - p. If you stop at the derivative with respect to the log-prob, every token of a row seems to
move alike, though the gradient goes to those the policy didn't expect."""
logit_pushes.right = {
    by_autograd: "let torch.autograd.grad do it, with two logits per position, the sampled token's "
    "and one for all others together.",
}
logit_pushes.wrong = {
    "pushes = torch.where(real, A.expand_as(probs), 0.0)": "That's the derivative with respect to "
    "the log-prob, so every token of a row moves alike. The log-prob follows its logit with a "
    "slope of 1 - p, so multiply by that.",
    "pushes = torch.where(real, A * probs, 0.0)": "You multiply by p, so the tokens that the "
    "policy was sure of move the most. The derivative of log p by its own logit is 1 - p.",
    "pushes = torch.where(real, A * probs * (1 - probs), 0.0)": "That's the derivative of the "
    "probability itself. Of its logarithm, the p in front cancels, and 1 - p is left.",
    "return pushes / mask.numel()": "You divide by N * T, so every bit of padding makes the pushes "
    "weaker. Count only the real tokens, mask.sum().",
    "return pushes / real.sum(dim=-1, keepdim=True).clamp(min=1)": "You divide each row by its own "
    "length, so a token in a short row is pushed harder. In the token mean, all tokens have the "
    "same divisor, the number of real tokens in the whole batch.",
}
square = torch.tensor([[0.9, 0.2], [0.6, 1.0]]), torch.tensor([1.0, -1.5])
logit_pushes.cases = {
    "sure and surprised": (torch.tensor([[0.9, 0.2]]), torch.tensor([1.0]), torch.ones(1, 2)),
    "two rows": (*square, torch.tensor([[1, 1], [1, 0]])),
    "an advantage of 0": (square[0], torch.tensor([0.0, 2.0]), torch.tensor([[1, 1], [0, 1]])),
    "a long row": (torch.full((1, 600), 0.1), torch.tensor([2.0]), LATE),
}
logit_pushes.draw = lambda r: batch(r, low=0.01, high=0.99)
logit_pushes.corners = {
    "garbage under the mask": (
        (torch.tensor([[0.4, float("nan")]]), torch.ones(1), torch.tensor([[1, 0]])),
        GARBAGE,
    ),
}
logit_pushes.hints = [
    "log p of the sampled token is its logit minus the logsumexp of all logits. What's the "
    "derivative of each part with respect to that one logit?",
    "The first part gives 1 and the second p, so it's 1 - p. Multiply it by the advantage, one for "
    "each row, advantages[:, None].",
    "torch.where(mask.bool(), advantages[:, None] * (1 - probs), 0.0), divided by the number of "
    "real tokens of the batch, mask.sum().",
]


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
    real = mask.bool()
    weights = torch.where(real & ~enough, ratio * A, 0.0)
    return weights / real.sum()


gradient_weights.why = """
The derivative of a ratio by its log-prob is the ratio itself, so a token gets ratio times
advantage, or 0 if it has gone far enough the way its advantage wants. If you zero everything
outside the range, good tokens that have become rare and bad ones that have become common can't come
back."""
gradient_weights.right = {
    through_the_loss: "let torch.autograd.grad find the derivative of the clipped objective.",
    "enough = ratio * A > ratio.clamp(1 - low, 1 + high) * A": "a token is pushed where ratio * A "
    "is the smaller of the two products, or equal.",
}
gradient_weights.wrong = {
    "enough = (ratio > 1 + high) | (ratio < 1 - low)": "You stop every token outside the bounds, "
    "whatever the sign of its advantage. But a token that has moved the wrong way (ratio 0.5 and a "
    "positive advantage) should be brought back.",
    "weights = torch.where(real, ratio * A, 0.0)": "You don't clip, so a good token that's already "
    "three times as likely is pushed three times as hard. Past its bound, leave it alone.",
    "weights = torch.where(real, ratio.clamp(1 - low, 1 + high) * A, 0.0)": "You weight with the "
    "clamped ratio. But where the clip acts, the objective is flat, and its derivative is 0.",
    "weights = torch.where(real & ~enough, A, 0.0)": "You leave out the ratio, so you have the "
    "derivative with respect to the ratio. With respect to the log-prob it's A * ratio.",
    "return weights / (weights != 0).sum().clamp(min=1)": "You divide by the number of tokens that "
    "still have a weight. A token that's been stopped counts in the mean too.",
}
SIGNS, MOVED = torch.tensor([1.0, -1.0]), torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
NEAR = torch.tensor([[1.34, 1.36, 0.7], [0.74, 0.76, 1.2]])
TWO_AND_ONE = torch.tensor([[1, 1, 1], [1, 1, 0]])
gradient_weights.cases = {
    "a good row and a bad one": (MOVED, SIGNS, torch.ones(2, 3), (0.2, 0.2)),
    "close to the bounds, and padding": (NEAR, SIGNS, TWO_AND_ONE, (0.25, 0.35)),
    "a low above 1, a high of 0": (NEAR, 2 * SIGNS, TWO_AND_ONE.bool(), (1.5, 0.0)),
    "a long row": (torch.full((1, 600), 0.9), torch.tensor([2.0]), LATE, (0.2, 0.28)),
}
gradient_weights.draw = lambda r: (
    *batch(r, low=0.055, high=3),
    (r.choice((0.0, 0.203, 1.5)), r.choice((0.0, 0.203, 0.284))),  # no ratio is at a bound
)
gradient_weights.corners = {
    "garbage under the mask": (
        (torch.tensor([[1.5, float("nan")]]), torch.ones(1), torch.tensor([[1, 0]]), (0.2, 0.9)),
        GARBAGE,
    ),
}
gradient_weights.hints = [
    "Without the clip the objective of a token is ratio * A, and ratio is exp(log_probs - "
    "old_log_probs). What's its derivative with respect to log_probs?",
    "The clip makes the objective flat, and its derivative 0, for tokens that have already moved "
    "far enough the way their advantage wants. With A = advantages[:, None], where is that for "
    "A > 0, and where for A < 0?",
    "enough = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low)). Take "
    "torch.where(mask.bool() & ~enough, ratio * A, 0.0) and divide by the number of real tokens.",
]


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


learnable.why = """
A group can teach something if its largest and smallest reward differ, and then all of its rows
stay, even one exactly at the mean. If you test for a standard deviation of 0 instead, float32 lets
you down, because for seven rewards of 0.8 it comes out at 6e-8."""
learnable.right = {
    (
        "differ = (groups != groups[:, :1]).any(dim=1, keepdim=True)",
        "return differ.expand_as(groups).flatten()",
    ): "compare every reward with the first of its group, with .any(dim=1, keepdim=True), and "
    "spread the result over the group with expand_as.",
}
learnable.wrong = {
    "return differ": "You return one value per group. The batch is filtered row by row, so repeat "
    "each value group_size times, with repeat_interleave.",
    "return differ.repeat(group_size)": "You repeat the whole list of groups. The rows come prompt "
    "by prompt, so repeat each value on its own, with repeat_interleave instead of repeat.",
    "mean = groups.mean(dim=1); differ = (mean > 0) & (mean < 1)": "You ask whether the group's "
    "mean is between 0 and 1. That works for rewards of 0 and 1 only.",
    "differ = (groups != 0).any(dim=1)": "You leave out only the groups where all rewards are 0. "
    "Where all are 1, or equal in any other way, there's nothing to learn either.",
    "return (groups - groups.mean(dim=1, keepdim=True)).abs().gt(1e-4).flatten()": "You ask each "
    "row for its own advantage. In a group with differences, a row exactly at the mean has "
    "advantage 0 and still counts in the averages, so keep whole groups.",
}
FOURS = [[1.0, 0, 1, 1], [0.5] * 4, [0.5, 1, 0, 0.5], [-1] * 4, [2, -2, -2, 2], [0, 0, 0.01, 0]]
learnable.cases = {
    "right and wrong": (torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]), 3),
    "other rewards": (torch.tensor(FOURS).flatten(), 4),
    "pairs": (torch.tensor([1.0, 1.0, 0.3, 0.301, -1.0, 1.0, 0.0, 0.0]), 2),
}
learnable.draw = equal_or_nearly
learnable.corners = {
    "seven rewards of 0.8": (
        (torch.full((7,), 0.8), 7),
        "You keep a group of seven rewards of 0.8, because the mean is rounded, and the standard "
        "deviation comes out at 6e-8. Compare the rewards with each other, such as amax with amin.",
    ),
    "tiny differences": (
        (torch.tensor([1.0, 1.000001, 0.5, 0.5]), 2),
        "Two rewards that differ by a millionth count as equal for you. amax != amin needs no "
        "tolerance, and the advantage divides by the std, which can make much of a little.",
    ),
}
learnable.hints = [
    "A completion is compared with its group. Which groups have nothing to compare?",
    "groups = rewards.view(-1, group_size). A group's rewards are all equal if the largest is the "
    "smallest, so compare groups.amax(dim=1) with groups.amin(dim=1).",
    "differ = groups.amax(dim=1) != groups.amin(dim=1) has one value per group, and "
    "differ.repeat_interleave(group_size) has one per row.",
]
