"""The exercises of notebook 09: several processes, and a sampler that is another program."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minigrpo import objective
from minigrpo.exercises.engine import Answer, Case, Exercise

NAN, INF = math.nan, math.inf


def _real(values: Tensor, mask: Tensor) -> Tensor:
    """0 where the mask is 0."""
    return torch.where(mask.bool(), values, 0.0)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(): the mean of each row over its real tokens, then the mean of the rows."""
    return (_real(values, mask).sum(-1) / mask.sum(-1)).mean()


# 9.1 ----------------------------------------------------------------------------------------


def rank_loss(per_token, mask, tokens_per_rank):
    """per_token, mask (N, T) of this process, tokens_per_rank (W,) of all -> scalar ()"""
    kept = torch.where(mask.bool(), per_token, 0.0)
    processes = len(tokens_per_rank)  # the average over them divides by it
    return processes * kept.sum() / tokens_per_rank.sum()


def _own_mean(x: Tensor, mask: Tensor) -> Tensor:
    return _real(x, mask).sum() / mask.sum()


def _weighted(weight: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The mean over the process's own tokens, times this function of its count and all counts."""
    return lambda x, mask, counts: _own_mean(x, mask) * weight(mask.sum(), counts)


def _share(mine: Tensor, counts: Tensor) -> Tensor:
    """What is right: W times the share of all tokens."""
    return len(counts) * mine / counts.sum()


def _own_mean_weighted(x: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
    own = x[mask.bool()]
    return own.mean() * len(own) / counts.double().mean()


RANK_LOSS = Exercise(
    key="9.1",
    title="a token mean over processes",
    reference=rank_loss,
    imports=("import torch",),
    package=lambda x, mask, counts: (
        objective.aggregate(x, mask, how="token_mean") * _share(mask.sum(), counts)
    ),
    others=(
        Answer(
            "own mean with a weight",
            _own_mean_weighted,
            "the mean over the own tokens, times their number over the mean number of tokens per "
            "process; that is W times the share of all tokens.",
        ),
        Answer(
            "divided by the mean of the counts",
            lambda x, mask, counts: x[mask.bool()].sum() / (counts.sum() / len(counts)),
            "the sum over the own tokens, divided by the mean number of tokens per process. Every "
            "process divides by the same number.",
        ),
    ),
    wrong=(
        Answer(
            "own token mean",
            _weighted(lambda mine, counts: torch.tensor(1)),
            "You take the mean over the tokens of this process. The average over the processes "
            "then gives each process the same weight, and a token counts more where there are few. "
            "Divide by a number that is the same on all processes.",
        ),
        Answer(
            "no W",
            _weighted(lambda mine, counts: mine / counts.sum()),
            "You divide by the number of all tokens and stop there. The gradients are averaged, "
            "not added, so the result is too small by the factor W. Multiply by the number of "
            "processes.",
        ),
        Answer(
            "divided by W",
            _weighted(lambda mine, counts: mine / counts.sum() / len(counts)),
            "You divide by the number of processes. The average does that already: multiply by W, "
            "so that the two cancel.",
        ),
        Answer(
            "W times the own mean",
            _weighted(lambda mine, counts: torch.tensor(len(counts))),
            "You take W times the mean over the tokens of this process. The factor W is right, but "
            "the sum belongs over the number of all tokens, not of the own ones.",
        ),
        Answer(
            "weight upside down",
            _weighted(lambda mine, counts: 1 / _share(mine, counts)),
            "Your weight is upside down: a process with few tokens gets a large one. It is "
            "W * (own tokens) / (all tokens).",
        ),
        Answer(
            "rank 0 assumed",
            _weighted(lambda mine, counts: _share(counts[0], counts)),
            "You take tokens_per_rank[0] for the own number of tokens. That is right on the first "
            "process only. The own number is mask.sum().",
        ),
        Answer(
            "last rank assumed",
            _weighted(lambda mine, counts: _share(counts[-1], counts)),
            "You take tokens_per_rank[-1] for the own number of tokens. That is right on the last "
            "process only. The own number is mask.sum().",
        ),
        Answer(
            "divided by the largest count",
            _weighted(lambda mine, counts: mine / counts.max()),
            "You divide by the largest of the counts. The mean over all tokens needs their sum.",
        ),
        Answer(
            "not divided",
            lambda x, mask, counts: _real(x, mask).sum(),
            "You return the sum over the own tokens. Divide it by the number of all tokens, and "
            "multiply by W, because the gradients will be averaged.",
        ),
        Answer(
            "divided by all positions",
            lambda x, mask, counts: _real(x, mask).mean(),
            "You divide by all positions of this process, padding included. Divide by the number "
            "of completion tokens on all processes, and multiply by W.",
        ),
        Answer(
            "mean per row",
            lambda x, mask, counts: _row_mean(x, mask),
            "You take the mean of each row first, so the tokens of short rows weigh more. All "
            "tokens weigh the same here: one sum, divided by the number of all tokens, times W.",
        ),
        Answer(
            "mean per row, weighted",
            lambda x, mask, counts: _row_mean(x, mask) * _share(mask.sum(), counts),
            "Your weight of the process is right, but within it you take the mean of each row "
            "first. All tokens weigh the same here: one sum over the tokens.",
        ),
        Answer(
            "mask not used",
            lambda x, mask, counts: len(counts) * x.sum() / counts.sum(),
            "You sum over all positions: what stands after the end of a row counts like text. Sum "
            "where the mask is 1.",
        ),
        Answer(
            "times the mask",
            lambda x, mask, counts: len(counts) * (x * mask).sum() / counts.sum(),
            "You multiply by the mask. Where something infinite or NaN stands under a 0 the result "
            "is NaN, because 0 * inf is NaN. Choose with torch.where instead.",
        ),
        Answer(
            "one per process",
            lambda x, mask, counts: _real(x, mask).sum() / counts,
            "You divide by the count of each process and get W numbers. This process has one loss: "
            "divide by the sum of the counts.",
        ),
        Answer(
            "detached",
            lambda x, mask, counts: rank_loss(x, mask, counts).detach(),
            "The number is right, but the gradient is cut off (detach, item or no_grad), so "
            "nothing could learn from this loss.",
        ),
    ),
    cases=(
        Case(
            "the second of three processes",
            (
                torch.tensor([[1.0, 2.0, -4.0, 0.5], [3.0, 7.0, 9.0, -1.0]]),
                torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]),
                torch.tensor([9, 5, 2]),
            ),
        ),
        Case(
            "the last of two, garbage after the end",
            (
                torch.tensor([[4.0, NAN, INF], [1.5, -0.5, -INF]]),
                torch.tensor([[1, 0, 0], [1, 1, 0]]).bool(),
                torch.tensor([7, 3]),
            ),
        ),
    ),
    hints=(
        "Two processes with 1 and 9 tokens: if each takes its own mean and the two are averaged, "
        "how much does the token count that stands alone?",
        "All processes together want (sum over all tokens) / (number of all tokens). The divisor "
        "is the same everywhere, tokens_per_rank.sum(). What does the average over W processes do "
        "to a sum, and how do you take it back?",
        "Put 0 where the mask is 0, with torch.where(mask.bool(), per_token, 0.0), add up, divide "
        "by tokens_per_rank.sum(), and multiply by len(tokens_per_rank).",
    ),
    gradient=(0,),
)


# 9.2 ----------------------------------------------------------------------------------------


def rank_advantages(rewards_per_rank, group_size, rank):
    """rewards_per_rank (W, n), in the order of the processes -> (n,), those of process rank"""
    groups = rewards_per_rank.reshape(-1, group_size)  # (P, G), whole groups
    centred = groups - groups.mean(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + 1e-4)
    return advantages.view_as(rewards_per_rank)[rank]


def _advantages(groups: Tensor) -> Tensor:
    """Of each row as a group."""
    return _centred(groups) / (groups.std(-1, keepdim=True) + 1e-4)


def _centred(groups: Tensor) -> Tensor:
    return groups - groups.mean(-1, keepdim=True)


def _of_groups(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int, int], Tensor]:
    """Right but for this function (P, G) -> (P, G)."""
    return lambda rewards, size, rank: function(rewards.view(-1, size)).view_as(rewards)[rank]


def _take(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int, int], Tensor]:
    """The right advantages (W, n) of all processes, of which this function takes some."""
    return lambda rewards, size, rank: function(
        _advantages(rewards.view(-1, size)).view_as(rewards), rank
    )


def _own_members(rewards: Tensor, size: int, rank: int) -> Tensor:
    """A group is what of it stands on this process."""
    n = rewards.shape[1]
    group = torch.arange(rank * n, (rank + 1) * n, device=rewards.device) // size
    return torch.cat([_advantages(rewards[rank][group == g]) for g in group.unique()])


def _interleaved(rewards: Tensor, size: int, rank: int) -> Tensor:
    advantages = _advantages(rewards.T.reshape(-1, size)).flatten()
    return advantages.view(-1, len(rewards))[:, rank]


def _row_by_row(rewards: Tensor, size: int, rank: int) -> Tensor:
    flat, n = rewards.flatten(), rewards.shape[1]
    found = []
    for row in range(rank * n, (rank + 1) * n):
        first = row // size * size  # where the group of this row begins
        group = flat[first : first + size]
        found.append((flat[row] - group.mean()) / (group.std() + 1e-4))
    return torch.stack(found)


RANK_ADVANTAGES = Exercise(
    key="9.2",
    title="a group on two processes",
    reference=rank_advantages,
    imports=(),
    package=lambda rewards, size, rank: objective.group_advantages(rewards.flatten(), size)[
        rank * rewards.shape[1] : (rank + 1) * rewards.shape[1]
    ],
    others=(
        Answer(
            "cut into pieces",
            lambda rewards, size, rank: (
                _advantages(rewards.flatten().view(-1, size)).flatten().split(rewards.shape[1])
            )[rank],
            "all advantages in one long list, of which .split(n)[rank] is the piece of process "
            "rank.",
        ),
        Answer(
            "row by row",
            _row_by_row,
            "for row i of the whole batch the group begins at i // group_size * group_size.",
        ),
    ),
    wrong=(
        Answer(
            "own rows as groups",
            lambda rewards, size, rank: _advantages(rewards[rank].view(-1, size)).flatten(),
            "You make groups of the own rows alone. That is right as long as no group lies on two "
            "processes; here one does, and the own rows do not fill whole groups. Make the groups "
            "from all rewards, then take the own rows.",
        ),
        Answer(
            "own rows cut from the first",
            lambda rewards, size, rank: torch.cat(
                [_advantages(group) for group in rewards[rank].split(size)]
            ),
            "You cut the own rows into groups, from the first own row on. Your first rows may "
            "belong to a group that began on the process before. Make the groups from all rewards.",
        ),
        Answer(
            "own members only",
            _own_members,
            "You know which rows belong together, but mean and std are those of the own rows "
            "alone. The members on other processes count as well: that is why the rewards are "
            "gathered.",
        ),
        Answer(
            "the process as a group",
            lambda rewards, size, rank: _advantages(rewards)[rank],
            "You take each process for a group. A group has group_size rows, wherever they are.",
        ),
        Answer(
            "all as one group",
            lambda rewards, size, rank: _advantages(rewards.flatten()).view_as(rewards)[rank],
            "You take all rewards for one group, so easy prompts look like good answers. Compare "
            "each reward with those of its own prompt.",
        ),
        Answer(
            "number of groups",
            lambda rewards, size, rank: _advantages(rewards.view(size, -1)).view_as(rewards)[rank],
            "You make group_size groups. group_size is the number of rows in a group: "
            ".reshape(-1, group_size).",
        ),
        Answer(
            "groups interleaved",
            lambda rewards, size, rank: _advantages(rewards.view(size, -1).T).T.reshape(
                rewards.shape
            )[rank],
            "You take every P-th reward for a group. The rows of a prompt stand one after the "
            "other: .reshape(-1, group_size) has one group per row.",
        ),
        Answer(
            "processes interleaved",
            _interleaved,
            "You go through the rewards column by column: the first row of each process, then the "
            "second. The rows of process 0 come first, all of them: .flatten() without .T.",
        ),
        Answer(
            "groups column by column",
            lambda rewards, size, rank: _advantages(rewards.T.reshape(-1, size)).view(
                rewards.shape
            )[rank],
            "Your groups are made column by column: the first row of each process, then the second "
            "of each. Put process after process in one line instead, .flatten() without .T.",
        ),
        Answer(
            "sliced column by column",
            lambda rewards, size, rank: _advantages(rewards.view(-1, size)).flatten()[
                rank :: len(rewards)
            ],
            "The advantages are right, but you take every W-th of them. The rows of a process "
            "stand one after the other: rank * n to (rank + 1) * n.",
        ),
        Answer(
            "first process",
            _take(lambda advantages, rank: advantages[0]),
            "You return the advantages of process 0, whoever asks. Use rank.",
        ),
        Answer(
            "last process",
            _take(lambda advantages, rank: advantages[-1]),
            "You return the advantages of the last process, whoever asks. Use rank.",
        ),
        Answer(
            "group number rank",
            lambda rewards, size, rank: _advantages(rewards.view(-1, size))[rank],
            "You take the group whose number is rank. The process has n rows, of one group or of "
            "several: from rank * n up to, but without, (rank + 1) * n.",
        ),
        Answer(
            "counted from 1",
            _take(lambda advantages, rank: advantages[rank - 1]),
            "You return the advantages of the process before. Ranks are counted from 0.",
        ),
        Answer(
            "all in a table",
            _take(lambda advantages, rank: advantages),
            "The numbers are right, but you return those of all processes, as a table (W, n). "
            "Take the row of process rank.",
        ),
        Answer(
            "all in a list",
            _take(lambda advantages, rank: advantages.flatten()),
            "The numbers are right, but you return those of all processes, one after the other. "
            "The own ones go from rank * n to (rank + 1) * n.",
        ),
        Answer(
            "std with G",
            _of_groups(lambda g: _centred(g) / (g.std(1, keepdim=True, correction=0) + 1e-4)),
            "Your std divides by G (correction=0). GRPO's divides by G - 1, which is what "
            ".std does unless told otherwise.",
        ),
        Answer(
            "std of the batch",
            _of_groups(lambda g: _centred(g) / (g.std() + 1e-4)),
            "The mean is that of the group, but the std is that of all rewards. Both belong to the "
            "group: .std(dim=1, keepdim=True).",
        ),
        Answer(
            "variance",
            _of_groups(lambda g: _centred(g) / (g.var(1, keepdim=True) + 1e-4)),
            "You divide by the variance. Divide by its square root, the std.",
        ),
        Answer(
            "not divided",
            _of_groups(_centred),
            "You subtract the mean of the group and do not divide. Divide by the std of the group "
            "plus 1e-4.",
        ),
        Answer(
            "no eps",
            _of_groups(lambda g: _centred(g) / g.std(1, keepdim=True)),
            "A group of equal rewards has std 0, and 0 / 0 is NaN. Add 1e-4 to the std.",
        ),
        Answer(
            "another eps",
            _of_groups(lambda g: _centred(g) / (g.std(1, keepdim=True) + 1e-8)),
            "To a std that is not 0 you add nothing, or nearly nothing (1e-8, a clamp, a case for "
            "std 0 alone). Add 1e-4 to every std.",
        ),
        Answer(
            "eps in the root",
            _of_groups(lambda g: _centred(g) / (g.var(1, keepdim=True) + 1e-4).sqrt()),
            "You add 1e-4 to the variance, under the root. Add it to the std.",
        ),
    ),
    cases=(
        Case(
            "each group on one process",
            (
                torch.tensor(
                    [
                        [0.0, 1.0, 0.25, 1.5],
                        [2.0, 1.0, 3.0, 0.0],
                        [1.0, 0.0, 0.5, 0.5],
                        [0.0, 4.0, 0.5, 0.0],
                    ]
                ),
                2,
                2,
            ),
        ),
        Case(
            "a group on two processes",
            (
                torch.tensor([[1.0, 0.0, 0.5, 1.0, 3.0, 2.0], [0.0, 1.0, 2.5, 0.0, 1.5, 4.0]]),
                4,
                1,
            ),
        ),
    ),
    hints=(
        "Two processes with six rows each, groups of four. Write the numbers 0 to 11 in a line: "
        "where does each group begin, and where does the second process?",
        "Put all rewards in one line, in the order of the processes, and make whole groups of "
        "it: rewards_per_rank.reshape(-1, group_size). Then all is as on one process.",
        "Subtract the mean of each group (dim=1, keepdim=True), divide by its std + 1e-4, put the "
        "result back in the shape of rewards_per_rank, and take [rank].",
    ),
)


# 9.3 ----------------------------------------------------------------------------------------


def corrected_loss(per_token, log_probs, sampler_log_probs, mask, cap):
    """all (N, T) but cap, a number -> scalar (), the mean over all completion tokens"""
    real = mask.bool()
    weights = (log_probs - sampler_log_probs).exp().clamp(max=cap).detach()
    return (weights[real] * per_token[real]).mean()


def _weights(function: Callable[[Tensor, float], Tensor]) -> Callable[..., Tensor]:
    """The loss with constant weights: this function of the log-ratio (0 if masked) and the cap."""

    def answer(x: Tensor, new: Tensor, old: Tensor, mask: Tensor, cap: float) -> Tensor:
        return _own_mean(_real(x, mask) * function(_real(new - old, mask), cap).detach(), mask)

    return answer


def _of_real(function: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[..., Tensor]:
    """The same, where the function gets the real tokens alone: their losses, their log-ratios."""

    def answer(x: Tensor, new: Tensor, old: Tensor, mask: Tensor, cap: float) -> Tensor:
        real = mask.bool()
        return function(x[real], (new - old)[real].detach(), cap)

    return answer


def _capped(log_ratio: Tensor, cap: float) -> Tensor:
    return log_ratio.exp().clamp(max=cap)


def _one_weight_per_row(x: Tensor, new: Tensor, old: Tensor, mask: Tensor, cap: float) -> Tensor:
    total = _real(new - old, mask).sum(-1, keepdim=True)
    return _own_mean(_real(x, mask) * _capped(total, cap).detach(), mask)


def _two_wheres(x: Tensor, new: Tensor, old: Tensor, mask: Tensor, cap: float) -> Tensor:
    real = mask.bool()
    log_ratio = torch.where(real, new - old, 0.0)
    weights = torch.exp(log_ratio.clamp(max=math.log(cap))).detach()
    return (weights * torch.where(real, x, 0.0)).sum() / real.sum()


def _token_by_token(x: Tensor, new: Tensor, old: Tensor, mask: Tensor, cap: float) -> Tensor:
    total = torch.tensor(0.0, dtype=x.dtype, device=x.device)
    for row, column in mask.nonzero().tolist():
        weight = math.exp(new[row, column].item() - old[row, column].item())
        total = total + min(weight, cap) * x[row, column]
    return total / mask.sum()


CORRECTED_LOSS = Exercise(
    key="9.3",
    title="another program sampled",
    reference=corrected_loss,
    imports=(),
    package=lambda x, new, old, mask, cap: objective.aggregate(
        x * objective.policy_ratio(new, old, mask).clamp(max=cap).detach(), mask, how="token_mean"
    ),
    others=(
        Answer(
            "two masks and a cap on the logarithm",
            _two_wheres,
            "cap the log-ratio at log(cap), and put 0 under the mask twice, in the log-ratio and "
            "in per_token, before the two are multiplied.",
        ),
        Answer(
            "token by token",
            _token_by_token,
            "a loop over mask.nonzero(), in which .item() makes the weight a plain number.",
        ),
    ),
    wrong=(
        Answer(
            "upside down",
            _weights(lambda d, cap: _capped(-d, cap)),
            "Your weights are upside down. A token that the sampler wrote too rarely has to count "
            "more: the trainer's probability over the sampler's.",
        ),
        Answer(
            "no weights",
            _weights(lambda d, cap: torch.ones_like(d)),
            "Your weights are all 1, so the two programs are taken for the same. The weight of a "
            "token is exp(log_probs - sampler_log_probs), at most cap.",
        ),
        Answer(
            "no cap",
            _weights(lambda d, cap: d.exp()),
            "The cap is not used. A single token that the sampler found very unlikely would rule "
            "the whole batch.",
        ),
        Answer(
            "cap as the least",
            _weights(lambda d, cap: d.exp().clamp(min=cap)),
            "Your weights are cap or more: min and max have changed places. The smaller one of "
            "ratio and cap is asked for, .clamp(max=cap).",
        ),
        Answer(
            "cap below as well",
            _weights(lambda d, cap: d.exp().clamp(1 / cap, cap)),
            "You keep the weights above 1 / cap as well. They are cut above only: a small weight "
            "does no harm.",
        ),
        Answer(
            "cap of PPO",
            _weights(lambda d, cap: _capped(d, 1 + cap)),
            "You cut the weights at 1 + cap. In PPO the clip is the distance from 1; here cap is "
            "the largest weight itself.",
        ),
        Answer(
            "cap of 2",
            _weights(lambda d, cap: _capped(d, 2.0)),
            "The number 2.0 is written into your function. Use the argument cap.",
        ),
        Answer(
            "cap on the logarithm",
            _weights(lambda d, cap: d.clamp(max=cap).exp()),
            "You cut the difference of the log-probs at cap, so the weights go up to exp(cap). "
            "First exp, then the cap.",
        ),
        Answer(
            "above the cap dropped",
            _weights(lambda d, cap: torch.where(d.exp() > cap, 0.0, d.exp())),
            "You give weight 0 to a token whose ratio is above the cap. Some programs do that, it "
            "is called masked importance sampling. Here such a token keeps the weight cap.",
        ),
        Answer(
            "above the cap left out",
            _of_real(lambda x, d, cap: (d.exp() * x)[d.exp() <= cap].mean()),
            "You leave out the tokens whose ratio is above the cap. They keep the weight cap, and "
            "they count among the tokens.",
        ),
        Answer(
            "smaller product",
            _of_real(lambda x, d, cap: torch.minimum(d.exp() * x, _capped(d, cap) * x).mean()),
            "You take the smaller one of two products, as in PPO. Where the loss is negative that "
            "is the one without the cap. Cut the weight alone, whatever the sign of the loss.",
        ),
        Answer(
            "absolute difference",
            _weights(lambda d, cap: _capped(d.abs(), cap)),
            "You take the absolute difference, so no weight is below 1. A token that the sampler "
            "wrote too often has to count less: keep the sign.",
        ),
        Answer(
            "no exp",
            _weights(lambda d, cap: d.clamp(max=cap)),
            "Your weights are differences of log-probs. The ratio of the probabilities is asked "
            "for: exp of the difference.",
        ),
        Answer(
            "weights of mean 1",
            _of_real(lambda x, d, cap: (_capped(d, cap) * x).sum() / _capped(d, cap).sum()),
            "You divide by the sum of the weights, so that their mean is 1. Divide by the number "
            "of tokens.",
        ),
        Answer(
            "one weight per sequence",
            _one_weight_per_row,
            "You give all tokens of a row one weight, the product over the row. Each token has a "
            "weight of its own here.",
        ),
        Answer(
            "mean per row",
            lambda x, new, old, mask, cap: _row_mean(
                _real(x, mask) * _capped(_real(new - old, mask), cap).detach(), mask
            ),
            "You take the mean of each row first. One mean over all completion tokens is asked "
            "for, in which every token counts the same.",
        ),
        Answer(
            "divided by all positions",
            lambda x, new, old, mask, cap: (
                _real(x, mask) * _capped(_real(new - old, mask), cap).detach()
            ).mean(),
            "You divide by all positions, padding included. Divide by the number of completion "
            "tokens.",
        ),
        Answer(
            "not divided",
            _of_real(lambda x, d, cap: (_capped(d, cap) * x).sum()),
            "You return a sum. The mean over the completion tokens is asked for.",
        ),
        Answer(
            "mask not used",
            lambda x, new, old, mask, cap: (x * _capped(new - old, cap).detach()).mean(),
            "The mask is not used: what stands after the end of a row counts like text.",
        ),
        Answer(
            "times the mask",
            lambda x, new, old, mask, cap: (
                (x * _capped(new - old, cap).detach() * mask).sum() / mask.sum()
            ),
            "You multiply by the mask. Where NaN stands under a 0 the result is NaN, because "
            "0 * NaN is NaN. Choose the completion tokens instead.",
        ),
        Answer(
            "masked after the product",
            lambda x, new, old, mask, cap: _own_mean(x * _capped(new - old, cap).detach(), mask),
            "The value is right, but the gradient is NaN under the mask. You use the mask after "
            "the multiplication, and on the way back the 0 meets a weight that is NaN. Mask the "
            "weights and per_token before you multiply them, or pick the tokens: weights[real].",
        ),
        Answer(
            "not detached",
            lambda x, new, old, mask, cap: _own_mean(
                _real(x, mask) * _capped(_real(new, mask) - _real(old, mask), cap), mask
            ),
            "The value is right, but a gradient flows through the weights into log_probs. They "
            "are a constant correction of what the sampler did: detach them.",
        ),
        Answer(
            "not detached, late mask",
            lambda x, new, old, mask, cap: _own_mean(
                _real(x, mask) * _real(_capped(new - old, cap), mask), mask
            ),
            "The value is right, but the weights let a gradient through into log_probs, and it is "
            "even NaN under the mask. A weight is a constant: detach it.",
        ),
        Answer(
            "not detached, masked after the product",
            lambda x, new, old, mask, cap: _own_mean(x * _capped(new - old, cap), mask),
            "The value is right, the gradients are not, for two reasons. The weights are not "
            "detached. And you use the mask after the multiplication, which leaves NaN in the "
            "gradients under the mask: use it before.",
        ),
        Answer(
            "all detached",
            lambda *arguments: corrected_loss(*arguments).detach(),
            "The number is right, but the gradient is cut off altogether. Only the weights are "
            "constant; per_token keeps its gradient.",
        ),
    ),
    cases=(
        Case(
            "cap 2, weights from 0.2 to 3.3",
            (
                torch.tensor([[1.0, 2.0, -0.5, 0.25], [-3.0, 1.5, 4.0, -2.0]]),
                torch.tensor([[-1.0, -2.0, -0.3, -0.6], [-0.9, -0.2, -1.0, -0.5]]),
                torch.tensor([[-1.5, -0.4, -1.5, -0.7], [-0.7, -1.2, -2.0, -0.1]]),
                torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
                2.0,
            ),
        ),
        Case(
            "cap 1.5, garbage after the end",
            (
                torch.tensor([[2.0, NAN, INF], [-1.0, 0.5, NAN]]),
                torch.tensor([[-0.5, NAN, -INF], [-0.6, -1.1, NAN]]),
                torch.tensor([[-2.5, -1.0, -INF], [-0.9, -0.8, NAN]]),
                torch.tensor([[1, 0, 0], [1, 1, 0]]).bool(),
                1.5,
            ),
        ),
    ),
    hints=(
        "A token has probability 0.1 for the sampler and 0.2 for the trainer. How many times too "
        "rarely is it in the batch?",
        "The ratio of the two is exp(log_probs - sampler_log_probs). .clamp(max=cap) cuts it, and "
        ".detach() makes it a constant. Where the mask is 0 it may be NaN.",
        "real = mask.bool(), and weights[real] * per_token[real] has the completion tokens alone. "
        "Take the mean of that.",
    ),
    gradient=(0, 1),
)


# 9.4 ----------------------------------------------------------------------------------------


def idle_share(lengths):
    """lengths (B, N), of the N completions of each of B batches -> scalar (), floating point"""
    ticks = lengths.max(dim=1).values.sum()  # each batch takes as long as its longest
    places = lengths.shape[1] * ticks
    return 1 - lengths.sum() / places


def _longest(lengths: Tensor) -> Tensor:
    """(B,)"""
    return lengths.max(dim=1).values


def _after(ticks: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Right but for this number of ticks."""
    return lambda lengths: 1 - lengths.sum() / (lengths.shape[1] * ticks(lengths))


def _places(lengths: Tensor) -> Tensor:
    return lengths.shape[1] * _longest(lengths).sum()


def _tick_by_tick(lengths: Tensor) -> Tensor:
    """As it happens: one tick after the other, as long as any row of the batch writes."""
    seen = []
    for batch in lengths:
        left = batch.clone()
        while left.any():
            seen.append(left == 0)
            left = (left - 1).clamp(min=0)
    return torch.stack(seen).double().mean()


def _table(lengths: Tensor) -> Tensor:
    ticks = torch.arange(lengths.max(), device=lengths.device)
    writes = ticks < lengths[..., None]  # (B, N, longest of all)
    goes_on = writes.any(dim=1, keepdim=True)  # its batch does
    return (goes_on & ~writes).sum() / goes_on.expand_as(writes).sum()


def _batch_by_batch(lengths: Tensor) -> float:
    empty = places = 0
    for batch in lengths.tolist():
        empty += sum(max(batch) - length for length in batch)
        places += max(batch) * len(batch)
    return empty / places


IDLE_SHARE = Exercise(
    key="9.4",
    title="what waiting costs",
    reference=idle_share,
    imports=(),
    package=_tick_by_tick,
    others=(
        Answer(
            "a table of all places",
            _table,
            "a table (B, N, longest of all) of truth values: row n writes at tick t if "
            "t < lengths[b, n]. Empty is a place where the row does not write and another one of "
            "its batch does.",
        ),
        Answer(
            "batch by batch",
            _batch_by_batch,
            "a loop over the batches: a completion leaves max(batch) - length places empty, of "
            "max(batch). Add up both, and divide at the end.",
        ),
    ),
    wrong=(
        Answer(
            "mean of the shares",
            lambda lengths: (1 - lengths.sum(1) / (lengths.shape[1] * _longest(lengths))).mean(),
            "You take the mean of the shares of the batches, so a short batch counts as much as a "
            "long one. Add up the empty places of all batches, and divide by all places.",
        ),
        Answer(
            "one share per batch",
            lambda lengths: 1 - lengths.sum(1) / (lengths.shape[1] * _longest(lengths)),
            "You return one share for each batch. One for all places together is asked for: add "
            "up over the batches, then divide.",
        ),
        Answer(
            "longest of all",
            _after(lambda lengths: len(lengths) * lengths.max()),
            "You let each batch last as long as the longest of all. The next batch begins when the "
            "longest of its own batch has ended: .max(dim=1).",
        ),
        Answer(
            "across batches",
            _after(lambda lengths: lengths.max(dim=0).values.sum()),
            "Your maximum goes over the batches, row by row. Those who wait for each other are the "
            "rows of one batch: dim=1.",
        ),
        Answer(
            "batches for rows",
            lambda lengths: idle_share(lengths.T),
            "You have the two dimensions the other way round. A batch is a row of the table: "
            "lengths is (B, N), and the N of one batch wait for each other.",
        ),
        Answer(
            "times B",
            lambda lengths: 1 - lengths.sum() / (len(lengths) * _longest(lengths).sum()),
            "You multiply the ticks by the number of batches. In each tick there are as many "
            "places as a batch has rows, N = lengths.shape[1].",
        ),
        Answer(
            "N forgotten",
            lambda lengths: 1 - lengths.sum() / _longest(lengths).sum(),
            "You divide by the number of ticks. There are N places in each tick, so the number of "
            "places is N times as large.",
        ),
        Answer(
            "rows do not wait",
            _after(lambda lengths: lengths.sum(dim=0).max()),
            "You let a row go on to the next batch when it has ended. It has to wait: the next "
            "batch begins for all rows together. So first the maximum of each batch, then the sum.",
        ),
        Answer(
            "mean for maximum",
            _after(lambda lengths: lengths.double().mean(dim=1).sum()),
            "You let a batch last as long as its mean completion, so by your count nothing is ever "
            "empty. It lasts as long as its longest.",
        ),
        Answer(
            "median for maximum",
            _after(lambda lengths: lengths.median(dim=1).values.sum()),
            "You let a batch last as long as its median completion. The longer ones have to end "
            "too: take the maximum.",
        ),
        Answer(
            "minimum for maximum",
            _after(lambda lengths: lengths.min(dim=1).values.sum()),
            "You let a batch end with its shortest completion. It ends with its longest.",
        ),
        Answer(
            "in use",
            lambda lengths: 1 - idle_share(lengths),
            "You return the share of the places in use. The share of the empty ones is asked for, "
            "1 minus yours.",
        ),
        Answer(
            "empty to used",
            lambda lengths: _places(lengths) / lengths.sum() - 1,
            "You divide the empty places by those in use. Divide by all places.",
        ),
        Answer(
            "number of empty places",
            lambda lengths: _places(lengths) - lengths.sum(),
            "You return how many places are empty. Divide by the number of all places.",
        ),
        Answer(
            "share of the rows",
            lambda lengths: (lengths < _longest(lengths)[:, None]).double().mean(),
            "You return the share of the completions that leave their place early. How early "
            "matters too: count the ticks that each place stays empty.",
        ),
        Answer(
            "share of the ticks",
            lambda lengths: 1 - lengths.min(dim=1).values.sum() / _longest(lengths).sum(),
            "You return the share of the ticks in which at least one place is empty. In such a "
            "tick the other places may be in use: count places, not ticks.",
        ),
        Answer(
            "integer division, 1",
            lambda lengths: 1 - lengths.sum() // _places(lengths),
            "You divide with //, which leaves the places in use at 0 and your result at 1. "
            "A plain / of whole numbers has the decimals.",
        ),
        Answer(
            "integer division, 0",
            lambda lengths: (_places(lengths) - lengths.sum()) // _places(lengths),
            "Your result is a whole number, and so it is 0: // or .long() cuts the decimals off. "
            "Divide with /.",
        ),
    ),
    cases=(
        Case("three batches of three", (torch.tensor([[2, 7, 5], [3, 1, 4], [6, 6, 10]]),)),
        Case("two batches of four", (torch.tensor([[9, 2, 4, 8], [1, 9, 3, 5]]),)),
    ),
    hints=(
        "One batch of three with 2, 7 and 5 tokens. How many ticks does it take, how many places "
        "are there in them, and how many of these are in use?",
        "A batch takes as many ticks as its longest has tokens, and has N places in each. Over all "
        "batches, lengths.sum() places are in use.",
        "places = lengths.shape[1] * lengths.max(dim=1).values.sum(); of these "
        "lengths.sum() / places are in use, and the rest is empty.",
    ),
    number=True,
)

EXERCISES = (
    RANK_LOSS,
    RANK_ADVANTAGES,
    CORRECTED_LOSS,
    IDLE_SHARE,
)
