"""A sampler that is another program, and several processes"""

from math import inf

import torch

from minigrpo import objective
from minigrpo.exercises.form import UNDERFLOW, exercise, numbers, texts


def rows(*values):
    return torch.tensor(values)


@exercise("a different program sampled", gradient="losses log_probs sampler_log_probs")
def corrected_loss(losses, log_probs, sampler_log_probs, mask, cap):
    """all (N, T) but cap, a number -> scalar (), the mean over all completion tokens"""
    real = mask.bool()
    log_ratio = log_probs - sampler_log_probs
    ratio = log_ratio.exp()  # trainer over sampler
    weights = ratio.clamp(max=cap).detach()
    return (weights[real] * losses[real]).mean()


corrected_loss.why = """The sampler is a different policy, so a token is weighted by how much more
likely the trainer finds it. Detach the weight. If the log-probs come with a gradient, it flows
through the weight, too, and the first update pushes every token below the cap twice as hard."""
corrected_loss.wrong = {
    "weights = ratio.clamp(max=cap)": "A gradient flows through the weights too. Detach them.",
    "log_ratio = sampler_log_probs - log_probs": "Your weights are upside down. A token that the "
    "sampler wrote too rarely has to count more.",
    "weights = ratio.detach()": "You don't use the cap.",
    "weights = log_ratio.clamp(max=cap).exp().detach()": "You cap the difference of the "
    "log-probs, so the weights go up to exp(cap). Take exp first.",
    "return (weights[real] * losses[real]).sum() / weights[real].sum()": "You divide by the "
    "sum of the weights. Divide by the number of tokens.",
    "return (torch.where(real, weights * losses, 0.0).sum(1) / real.sum(1)).mean()": "You "
    "average row by row. Every token counts the same.",
}
LONG = torch.ones(1, 2049)
corrected_loss.cases = {
    "too rare, too frequent": (*rows([[1.0, 2]], [[-1.0, -3]], [[-4.0, -1]]), rows([1, 1]), 2.0),
    "never written": (*rows([[1.0, 2]], [[-31.0, -inf]], [[-31.5, -1]]), rows([1, 1]).bool(), 3.0),
    "a long row": (2 * LONG, -LONG, -1.5 * LONG, LONG, 5.0),
}
corrected_loss.garbage = True
corrected_loss.draw = lambda r: (*texts(r, 3), r.choice((1.5, 2.0, 3.0, 5.0)))
corrected_loss.corners = {
    "a log-prob of -120": ((*rows([[1.0]], [[-120.0]], [[-120.5]]), rows([1]), 3.0), UNDERFLOW)
}
corrected_loss.hints = """
The ratio is exp(log_probs - sampler_log_probs), .clamp(max=cap) caps it, .detach() fixes it.
With real = mask.bool(), take the mean of weights[real] * losses[real]."""


@exercise("the weight of a whole completion", gradient="log_probs sampler_log_probs")
def completion_weights(log_probs, sampler_log_probs, mask, cap):
    """all (N, T) but cap, a number -> (N,), 0 where the product is above cap"""
    log_ratio = (log_probs - sampler_log_probs).detach()
    product = torch.where(mask.bool(), log_ratio, 0.0).sum(dim=1).exp()  # (N,)
    return torch.where(product > cap, 0.0, product)


completion_weights.why = """A product of ratios is the exp of a sum of differences. Above the cap a
whole completion is dropped, where truncation would have left it a weight of cap."""
completion_weights.wrong = {
    "return product.clamp(max=cap)": "You cap the product. A completion above the cap gets 0.",
    "product = log_ratio.sum(dim=1).exp()": "You don't use the mask, so what comes after the end "
    "of a row counts too.",
    "log_ratio = (sampler_log_probs - log_probs).detach()": "Your weights are upside down. They're "
    "trainer over sampler.",
    "product = torch.where(mask.bool(), log_ratio, 0.0).sum(1).div(mask.bool().sum(1)).exp()": ""
    "You take the geometric mean. Here it's the product.",
    "log_ratio = log_probs - sampler_log_probs": "A gradient flows through the weights. Detach "
    "them.",
}
completion_weights.cases = {
    "kept": (*rows([[-1.0, -2.0]], [[-1.5, -2.25]]), rows([1, 1]), 3.0),
    "dropped": (*rows([[-1.0, -1.0]], [[-2.0, -1.5]]), rows([1, 1]).bool(), 3.0),
    "a long row": ((1 / 1024 - 1) * LONG, -LONG, LONG, 10.0),
}
completion_weights.garbage = True
completion_weights.draw = lambda r: (*texts(r, 2, low=-1.5), r.choice((1.5, 2.0, 3.0, 5.0)))
completion_weights.hints = """
What is the log of a product of ratios?
Sum torch.where(mask.bool(), log_probs - sampler_log_probs, 0.0) over each row, and take exp."""


@exercise("a token mean over processes", gradient="losses")
def rank_loss(losses, mask, tokens_per_rank):
    """losses, mask (N, T) of this process, tokens_per_rank (W,) of all -> scalar ()"""
    kept = torch.where(mask.bool(), losses, 0.0)
    processes = len(tokens_per_rank)  # the average over them divides by it
    return processes * kept.sum() / tokens_per_rank.sum()


rank_loss.why = """DDP averages the gradients of W processes, so divide your own sum by the tokens
of all, times W. With each process's own count, a token counts more where there are few of them."""
rank_loss.right = ["return losses[mask.bool()].sum() / (tokens_per_rank.sum() / processes)"]
rank_loss.wrong = {
    "return kept.sum() / mask.sum().clamp(min=1)": "You take the mean over the tokens of this "
    "process. Divide by the number of all tokens.",
    "return kept.sum() / tokens_per_rank.sum()": "You divide by the number of all tokens and stop "
    "there. The gradients are averaged, so multiply by W.",
    "kept = losses": "You don't use the mask, so what comes after the end of a row counts too.",
    "processes = (tokens_per_rank > 0).sum()": "You count only the processes that have tokens. "
    "The average divides by all of them.",
    "return losses[mask.bool()].mean() * mask.sum() * processes / tokens_per_rank.sum()": "A "
    "process may have no token, and then your own mean is 0/0. Start from the sum.",
    "return kept.sum() / tokens_per_rank.sum() / processes": "The average divides by W. Multiply.",
}
rank_loss.cases = {
    "one token, and nine elsewhere": (rows([5.0, 2.0]), rows([1, 0]), rows(1, 9)),
    "a process without a token": (rows([3.0, 8.0]), rows([0, 0]).bool(), rows(0, 6)),
    "a long row": (torch.full((1, 600), 2.0), torch.ones(1, 600), rows(600, 1449)),
}
rank_loss.garbage = rank_loss.graph = True
rank_loss.draw = lambda r: (
    *(given := texts(r, 1, high=4.0)),
    rows(*r.sample([int(given[1].sum()), *r.choices((0, 3, 8), k=(k := r.randrange(4)))], k + 1)),
)
rank_loss.hints = """
Every process divides by tokens_per_rank.sum(). What does the average over W then do to it?
Sum torch.where(mask.bool(), losses, 0.0), and multiply by len(tokens_per_rank)."""


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


rank_advantages.why = """A group may begin on one process and end on the next, so normalize whole
groups and pick your own rows last. With one row per process the standard deviation is NaN."""
rank_advantages.right = ["return advantages.flatten().split(rewards_per_rank.shape[1])[rank]"]
rank_advantages.wrong = {
    (
        "groups = rewards_per_rank; own = groups[rank].split(group_size)",
        "return torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in own])",
    ): "You make groups of your own rows alone, but a group may have begun on the process before.",
    "groups = rewards_per_rank.reshape(1, -1)": "That's one group for all: you mix the prompts.",
    "std = groups.std(dim=1, keepdim=True, correction=0)": "GRPO divides by G - 1.",
    "advantages = (groups - mean) / (std + 1e-8)": "Add 1e-4 to the std.",
    "return advantages.flatten()[rank * group_size :][: rewards_per_rank.shape[1]]": "You begin "
    "at rank * group_size. Each process has n rows, so its own begin at rank * n.",
    ("groups = rewards_per_rank[rank][None]", "return advantages.flatten()"): "You normalize your "
    "own rows alone, but a group may lie on two processes.",
}
rank_advantages.cases = {
    "a group on two processes": (rows([1.0, 0.0, 0.5], [2.0, 0.0, 0.0]), 2, 1),
    "one row on each process": (rows([1.0], [0.0], [0.5], [2.0], [2.0], [-1.0]), 3, 3),
    "rewards that differ little": (rows([-0.01, 0.0, 0.01]), 3, 0),
    "one is right in a large group": (torch.eye(600)[0].roll(7).view(2, 300), 600, 0),
}
rank_advantages.draw = lambda r: (
    numbers(r, (W := r.choice((1, 2, 3, 4, 6, 12))), 12 // W),
    *(r.choice((2, 3, 4, 6, 12)), r.randrange(W)),
)
rank_advantages.hints = """
rewards_per_rank.reshape(-1, group_size) has one group per row, whoever sampled it.
Normalize each row, put the result back in the shape of rewards_per_rank, and take [rank]."""
