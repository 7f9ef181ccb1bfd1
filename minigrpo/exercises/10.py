"""Several processes, and a sampler that is another program"""

import math

import torch

from minigrpo import objective
from minigrpo.exercises.form import exercise, mask, numbers, whole

inf, nan = math.inf, math.nan


def rows(*values):
    return torch.tensor(values)


@exercise("a token mean over processes", gradient="per_token")
def rank_loss(per_token, mask, tokens_per_rank):
    """per_token, mask (N, T) of this process, tokens_per_rank (W,) of all -> scalar ()"""
    kept = torch.where(mask.bool(), per_token, 0.0)
    processes = len(tokens_per_rank)  # the average over them divides by it
    return processes * kept.sum() / tokens_per_rank.sum()


rank_loss.why = """
DDP averages the gradients of W processes, so you divide your own sum by the tokens of all of them
and multiply by W, and the average is the mean over all tokens. If each process divides by its own
count instead, a token counts more on a process that has few of them, and the gradient depends on
how the rows were dealt out."""
rank_loss.right = {
    "return per_token[mask.bool()].sum() / (tokens_per_rank.sum() / processes)": "the sum over "
    "your own tokens, divided by the mean number of tokens per process.",
}
rank_loss.wrong = {
    "return kept.sum() / mask.sum().clamp(min=1)": "You take the mean over the tokens of this "
    "process, so a token counts more where there are few. Divide by the number of all tokens.",
    "return kept.sum() / tokens_per_rank.sum()": "You divide by the number of all tokens and stop "
    "there. The gradients are averaged, not added, so the result is too small by a factor of W.",
    "return (kept.sum(-1) / mask.sum(-1).clamp(min=1)).mean()": "You average each row first, so "
    "the tokens of short rows weigh more. Here all tokens of all processes weigh the same.",
    "kept = per_token": "You don't use the mask, so what comes after the end of a row counts too.",
    "processes = (tokens_per_rank > 0).sum()": "You count only the processes that have tokens. The "
    "average of the gradients divides by all of them, so W is len(tokens_per_rank).",
    "return per_token[mask.bool()].mean() * mask.sum() * processes / tokens_per_rank.sum()": "You "
    "start from your own mean. A process may have no token, and that's 0/0. Start from the sum.",
}
rank_loss.cases = {
    "one token, and nine elsewhere": (rows([5.0, 2.0]), rows([1, 0]), rows(1, 9)),
    "a process without a token": (rows([3.0, 8.0]), rows([0, 0]).bool(), rows(0, 6)),
    "a long row": (torch.full((1, 600), 2.0), torch.ones(1, 600), rows(600, 1449)),
}
rank_loss.draw = lambda r: (
    numbers(r, *(shape := (r.randint(1, 3), r.randint(1, 5)))),
    (real := mask(r, *shape, holes=True)),
    rows(*r.sample([int(real.sum()), *r.choices((0, 3, 8), k=(k := r.randrange(4)))], k + 1)),
)
rank_loss.corners = {
    "garbage under the mask": (
        (rows([1.0, nan, inf]), rows([1, 0, 0]), rows(1, 4)),
        "Under a 0 of the mask there may be NaN, and 0 * NaN is NaN, which the average spreads to "
        "all processes. torch.where never looks there, a product with the mask does.",
    ),
}
rank_loss.hints = [
    "Of 1 token here and 9 there, how much does the single one count if two means are averaged?",
    "Every process divides by tokens_per_rank.sum(). What does the average over W then do to it?",
    "Put 0 where the mask is 0, with torch.where(mask.bool(), per_token, 0.0), add up, divide by "
    "tokens_per_rank.sum(), and multiply by len(tokens_per_rank).",
]


@exercise(
    "a group on two processes",
    package=lambda r, G, rank: objective.group_advantages(r.flatten(), G).view_as(r)[rank],
)
def rank_advantages(rewards_per_rank, group_size, rank):
    """rewards_per_rank (W, n), in the order of the processes -> (n,), those of process rank"""
    groups = rewards_per_rank.reshape(-1, group_size)  # one row per group
    mean = groups.mean(dim=1, keepdim=True)
    std = groups.std(dim=1, keepdim=True)
    advantages = (groups - mean) / (std + 1e-4)
    return advantages.view_as(rewards_per_rank)[rank]


rank_advantages.why = """
A group may begin on one process and end on the next, so you put the gathered rewards in the order
of the batch, normalize whole groups, and pick your own rows last. If you normalize the rows of one
process, part of a group is compared only with itself, and with one row per process the standard
deviation is NaN."""
rank_advantages.right = {
    "return advantages.flatten().split(rewards_per_rank.shape[1])[rank]": "put all advantages in "
    "one long list, and take the piece of process rank, .split(n)[rank].",
}
rank_advantages.wrong = {
    "own = rewards_per_rank[rank].split(group_size); "
    "return torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in own])": "You make groups of your "
    "own rows alone, but a group may have begun on the process before. Make them from all rewards.",
    (
        "groups = rewards_per_rank[rank].view(-1, group_size)",
        "return advantages.flatten()",
    ): "You cut your own rows into groups, but they don't always fill whole ones. Cut all rewards "
    "into groups first, and take your own rows last.",
    "groups = rewards_per_rank.reshape(1, -1)": "You take all rewards for one group, so easy "
    "prompts look like good answers. Compare each reward with those of its own prompt.",
    "std = groups.std(dim=1, keepdim=True, correction=0)": "Your std divides by G (correction=0). "
    "GRPO's divides by G - 1, which is what .std does unless told otherwise.",
    "advantages = (groups - mean) / (std + 1e-8)": "You add nothing, or next to nothing, to the "
    "std, and where the rewards of a group hardly differ, that shows. Add 1e-4.",
    "return advantages.flatten()[rank * group_size :][: rewards_per_rank.shape[1]]": "You begin at "
    "rank * group_size. But each process has n rows, so its own begin at rank * n.",
}
rank_advantages.cases = {
    "a group on two processes": (rows([1.0, 0.0, 0.5], [2.0, 0.0, 0.0]), 2, 1),
    "one row on each process": (rows([1.0], [0.0], [0.5], [2.0], [2.0], [-1.0]), 3, 3),
    "equal rewards": (rows([1.0, 1.0, 1.0, 0.0]), 2, 0),
    "rewards that differ little": (rows([-0.01, 0.0, 0.01]), 3, 0),
    "one is right in a large group": (torch.eye(600)[0].roll(7).view(2, 300), 600, 0),
}
rank_advantages.draw = lambda r: (
    numbers(r, (W := r.choice((1, 2, 3, 4, 6, 12))), 12 // W),
    *(r.choice((2, 3, 4, 6, 12)), r.randrange(W)),
)
rank_advantages.corners = {
    "rewards around 10,000": (
        (rows([10_000.0, 10_001.0], [10_003.0, 10_000.0]), 4, 0),
        "With rewards around 10,000 the numbers are off. Is your variance a difference of two "
        "large squares? .std subtracts the mean first.",
    ),
}
rank_advantages.hints = [
    "Take two processes with six rows each, and groups of four. Write the numbers 0 to 11 in a "
    "line. Where does each group begin, and where does the second process?",
    "rewards_per_rank.reshape(-1, group_size) has one group per row, whoever sampled it.",
    "Subtract the mean of each group (dim=1, keepdim=True), divide by its std + 1e-4, put the "
    "result back in the shape of rewards_per_rank, and take [rank].",
]


@exercise("a different program sampled", gradient="per_token log_probs sampler_log_probs")
def corrected_loss(per_token, log_probs, sampler_log_probs, mask, cap):
    """all (N, T) but cap, a number -> scalar (), the mean over all completion tokens"""
    real = mask.bool()
    log_ratio = log_probs - sampler_log_probs
    ratio = log_ratio.exp()  # trainer over sampler
    weights = ratio.clamp(max=cap).detach()
    return (weights[real] * per_token[real]).mean()


corrected_loss.why = """
The program that sampled is a different policy, so every token is weighted by how much more likely
the trainer finds it, up to a cap, and the weight is a constant. If you forget to detach it, a
second gradient flows through the weight, and at the first update of GRPO every token below the cap
is pushed twice as hard as its weight says."""
corrected_loss.right = {
    (
        "log_ratio = torch.where(real, log_probs - sampler_log_probs, 0.0)",
        "return (weights * torch.where(real, per_token, 0.0)).sum() / mask.sum()",
    ): "put 0 under the mask, in the log-ratio and in per_token, before the two are multiplied.",
}
corrected_loss.wrong = {
    "weights = ratio.clamp(max=cap)": "The value is correct, but a gradient flows through the "
    "weights too. They only correct for what the sampler did, so they're constants. Detach them.",
    "log_ratio = sampler_log_probs - log_probs": "Your weights are upside down. A token that the "
    "sampler wrote too rarely has to count more, so divide by the sampler's probability.",
    "weights = ratio.detach()": "You don't use the cap, so a single token that the sampler found "
    "far less likely than the trainer does would dominate the batch. Clamp the ratio at cap.",
    "weights = log_ratio.clamp(max=cap).exp().detach()": "You cap the difference of the log-probs, "
    "so the weights go up to exp(cap). Take the exp first, then cap it.",
    "weights = ratio.clamp(1 / cap, cap).detach()": "You keep the weights above 1 / cap as well. "
    "Cap them from above only, because a small weight does no harm.",
    "return (weights[real] * per_token[real]).sum() / weights[real].sum()": "You divide by the sum "
    "of the weights, as if their mean had to be 1. Divide by the number of tokens.",
}
LONG = torch.ones(1, 2049)
corrected_loss.cases = {
    "a token too rare, and one too frequent": (
        *rows([[1.0, 2.0]], [[-1.0, -3.0]], [[-4.0, -1.0]]),
        *(rows([1, 1]), 2.0),
    ),
    "one that the trainer would never write, and an empty row": (
        rows([1.0, -2.0, 3.0], [5.0, 6.0, 7.0]),
        rows([-31.0, -inf, -30.0], [-1.0, -1.0, -2.0]),
        rows([-31.5, -1.0, -29.0], [-1.0, -2.0, -2.0]),
        *(rows([1, 1, 1], [0, 0, 0]).bool(), 3.0),
    ),
    "a long row": (2 * LONG, -LONG, -1.5 * LONG, LONG, 5.0),
}
corrected_loss.draw = lambda r: (
    numbers(r, *(shape := (r.randint(1, 3), r.randint(1, 4)))),
    *(numbers(r, *shape, low=-4, high=0) for _ in range(2)),
    *(mask(r, *shape, holes=True), r.choice((1.5, 2.0, 3.0, 5.0))),
)
corrected_loss.corners = {
    "garbage under the mask": (
        (
            *rows([[2.0, nan, 1.0]], [[-0.5, -1.0, nan]], [[-2.5, -1.0, -inf]]),
            *(rows([1, 0, 0]), 1.5),
        ),
        "With NaN under a 0 of the mask you get NaN, in the value or in the gradient, because "
        "0 * NaN is NaN. Pick the completion tokens first, with [real], and multiply then.",
    ),
    "a log-prob of -120": (
        (*rows([[1.0]], [[-120.0]], [[-120.5]]), rows([1]), 3.0),
        "exp(-120) is 0 in float32, and a ratio of two such probabilities is 0/0. Subtract the "
        "log-probs, and take the exp of the difference.",
    ),
}
corrected_loss.hints = [
    "A token has probability 0.1 for the sampler and 0.2 for the trainer. How much too rare is it?",
    "The ratio is exp(log_probs - sampler_log_probs). .clamp(max=cap) caps it, and .detach() makes "
    "it a constant. Where the mask is 0 it may be NaN.",
    "With real = mask.bool(), take the mean of weights[real] * per_token[real].",
]


@exercise("what waiting costs")
def idle_share(lengths):
    """lengths (B, N), of the N completions of each of B batches -> scalar (), floating point"""
    longest = lengths.max(dim=1).values  # (B,), as long as each batch takes
    ticks = longest.sum()
    slots = lengths.shape[1] * ticks
    return 1 - lengths.sum() / slots


idle_share.why = """
Every batch lasts as long as its longest row, so it offers that many ticks times N slots, and what
the tokens don't fill is empty. If you average the fractions of the batches instead of adding up
their slots, a short batch counts as much as a long one, although far more of the sampler's time
goes into the long one."""


def table(lengths):
    writes = torch.arange(lengths.max()) < lengths[..., None]  # (B, N, longest of all)
    goes_on = writes.any(dim=1, keepdim=True).expand_as(writes)  # its batch does
    return (goes_on & ~writes).sum() / goes_on.sum()


idle_share.right = {
    table: "make a table (B, N, longest of all) of truth values. Row n writes at tick t if "
    "t < lengths[b, n]. A slot is empty where it doesn't and another row of its batch does.",
}
idle_share.wrong = {
    "return (1 - lengths.sum(dim=1) / (lengths.shape[1] * longest)).mean()": "You average the "
    "fractions, so a short batch counts as much as a long one. Add up the slots first.",
    "ticks = len(lengths) * lengths.max()": "You let every batch last as long as the longest "
    "completion of all. It lasts only as long as its own longest, .max(dim=1).",
    "return lengths.sum() / slots": "That's the fraction in use. Return 1 minus it.",
    "return slots / lengths.sum() - 1": "You divide by the slots in use. Divide by all of them.",
    "slots = len(lengths) * ticks": "You multiply the ticks by the number of batches. Each tick "
    "has as many slots as a batch has rows, N = lengths.shape[1].",
    "ticks = lengths.sum(dim=0).max()": "You let a row go on to the next batch as soon as it has "
    "ended. It has to wait, because the next batch begins for all rows together.",
}
idle_share.cases = {
    "a short batch and a long one": (rows([1, 2, 1], [8, 2, 5]),),
    "a batch in which nobody waits": (rows([1, 2], [3, 3]),),
    "one row in each batch": (rows([5], [7], [7]),),
    "long ones": (rows([600, 301, 17, 5], [420, 7, 599, 64]),),
}
idle_share.draw = lambda r: (whole(r, r.randint(1, 4), r.randint(1, 4), high=9) + 1,)
idle_share.hints = [
    "Of three completions with 2, 7 and 5 tokens, how many slots are there, and how many in use?",
    "A batch takes as many ticks as its longest completion has tokens, with N slots in each. Over "
    "all batches, lengths.sum() slots are in use.",
    "There are lengths.shape[1] * lengths.max(dim=1).values.sum() slots.",
]
