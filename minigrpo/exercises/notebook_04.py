"""The exercises of notebook 04: the token-level objective, term by term."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minigrpo import logprobs, objective
from minigrpo.exercises.engine import Answer, Case, Exercise

NAN, INF = math.nan, math.inf


# 4.1 ----------------------------------------------------------------------------------------


def leave_one_out(rewards, group_size):
    """rewards (N,), the first group_size belong to the first prompt, and so on -> (N,)"""
    groups = rewards.view(-1, group_size)  # (P, G)
    others = groups.sum(dim=1, keepdim=True) - groups  # the sum without oneself
    return (groups - others / (group_size - 1)).flatten()


def _grouped(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """From a function (P, G) -> (P, G) to one of rewards and group_size."""
    return lambda rewards, size: function(rewards.view(-1, size)).flatten()


def _centred(groups: Tensor) -> Tensor:
    return groups - groups.mean(1, keepdim=True)


def _others_sum(groups: Tensor) -> Tensor:
    return groups.sum(1, keepdim=True) - groups


def _others_mean(groups: Tensor) -> Tensor:
    return _others_sum(groups) / (groups.shape[1] - 1)


def _others_best(groups: Tensor) -> Tensor:
    """The largest of the others' rewards."""
    size = groups.shape[1]
    oneself = torch.eye(size, dtype=torch.bool, device=groups.device)
    return groups[:, None].expand(-1, size, -1).masked_fill(oneself, -INF).amax(-1)


def _one_by_one(rewards: Tensor, size: int) -> Tensor:
    found = []
    for group in rewards.split(size):
        for i in range(size):
            found.append(group[i] - torch.cat([group[:i], group[i + 1 :]]).mean())
    return torch.stack(found)


LEAVE_ONE_OUT = Exercise(
    key="4.1",
    title="leave-one-out baseline",
    reference=leave_one_out,
    imports=(),
    package=lambda rewards, size: objective.group_advantages(
        rewards, size, scale="none", baseline="leave_one_out"
    ),
    others=(
        Answer(
            "stretched mean",
            lambda rewards, size: _grouped(_centred)(rewards, size) * size / (size - 1),
            "the reward minus the mean of the whole group, times G / (G - 1).",
        ),
        Answer("one by one", _one_by_one, "leave out one reward after the other in two loops."),
    ),
    wrong=(
        Answer(
            "mean with oneself",
            _grouped(_centred),
            "You subtract the mean of the whole group, and each reward is part of that mean: the "
            "result is too small by the factor (G - 1) / G. Leave the reward itself out.",
        ),
        Answer(
            "factor upside down",
            lambda rewards, size: _grouped(_centred)(rewards, size) * (size - 1) / size,
            "Your factor is upside down. Taking a reward out of its own baseline makes the "
            "difference larger: G / (G - 1).",
        ),
        Answer(
            "others divided by G",
            _grouped(lambda g: g - _others_sum(g) / g.shape[1]),
            "You divide the sum of the others by G. Without oneself there are G - 1.",
        ),
        Answer(
            "all divided by G - 1",
            _grouped(lambda g: g - g.sum(1, keepdim=True) / (g.shape[1] - 1)),
            "You divide by G - 1, but the reward itself is still in the sum. Take it out: the "
            "sum of the group minus the reward.",
        ),
        Answer(
            "sum of the others",
            _grouped(lambda g: g - _others_sum(g)),
            "You subtract the sum of the others. Divide it by how many they are, G - 1.",
        ),
        Answer(
            "mean of the batch",
            _grouped(lambda g: g - g.mean()),
            "You compare with all rewards of the batch. A completion is compared with those that "
            "answered the same prompt; otherwise easy prompts look like good answers.",
        ),
        Answer(
            "others in the batch",
            lambda rewards, size: leave_one_out(rewards, len(rewards)),
            "You leave out the reward itself, but from the whole batch. Only the other members "
            "of its group, the completions of the same prompt, are compared.",
        ),
        Answer(
            "groups interleaved",
            lambda rewards, size: (
                leave_one_out(rewards.view(size, -1).T.flatten(), size).view(-1, size).T.flatten()
            ),
            "You take every P-th reward for a group. The rows come prompt by prompt: the first "
            "group_size belong together, so .view(-1, group_size) has one group per row.",
        ),
        Answer(
            "divided by the std",
            _grouped(lambda g: (g - _others_mean(g)) / (g.std(1, keepdim=True) + 1e-4)),
            "The difference is right, but you divide it by the std, as GRPO does. Here nothing "
            "is divided: the advantage is in the unit of the reward.",
        ),
        Answer(
            "advantages of GRPO",
            _grouped(lambda g: _centred(g) / (g.std(1, keepdim=True) + 1e-4)),
            "Those are the advantages of notebook 03: mean of the whole group, divided by the "
            "std. Here the mean is that of the others, and nothing is divided.",
        ),
        Answer(
            "baseline alone",
            _grouped(_others_mean),
            "That is the baseline, the mean of the others. Subtract it from the reward.",
        ),
        Answer(
            "sign",
            _grouped(lambda g: _others_mean(g) - g),
            "You subtract the reward from the baseline. A reward above the others must come out "
            "positive: reward minus baseline.",
        ),
        Answer(
            "best of the others",
            _grouped(lambda g: g - _others_best(g)),
            "You subtract the best of the others, so that one member of a group at most is "
            "pushed up. Subtract their mean.",
        ),
        Answer(
            "still a table",
            lambda rewards, size: leave_one_out(rewards, size).view(-1, size),
            "The numbers are right, but they still stand in a table (P, G). One for each row of "
            "the batch is asked for, (N,): flatten it.",
        ),
    ),
    cases=(
        Case(
            "one easy prompt, one hard, one of equal rewards",
            (torch.tensor([9.0, 7.0, 8.0, 4.0, 1.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0]), 4),
        ),
        Case("groups of two", (torch.tensor([1.0, 0.0, 0.25, 0.75, 3.0, 2.5]), 2)),
    ),
    hints=(
        "With rewards 1, 0, 0, 0: what is the mean of the others for the first, and for the "
        "second?",
        "groups = rewards.view(-1, group_size). The sum of the others is the sum of the group "
        "minus oneself: groups.sum(dim=1, keepdim=True) - groups.",
        "Divide it by group_size - 1, subtract it from groups, and .flatten() at the end.",
    ),
    lapses=(
        lambda rewards, size: leave_one_out(rewards, 4),
        _grouped(lambda g: g - g.flip(1)),  # "the other one" of two
    ),
)


# 4.2 ----------------------------------------------------------------------------------------


def average(per_token, mask, how, max_length):
    """per_token, mask (N, T), how "sequence_mean", "token_mean" or "constant" -> scalar ()"""
    real = mask.bool()
    kept = torch.where(real, per_token, 0.0)
    if how == "sequence_mean":
        return (kept.sum(dim=-1) / real.sum(dim=-1).clamp(min=1)).mean()
    if how == "token_mean":
        return kept.sum() / real.sum().clamp(min=1)
    return kept.sum() / (len(per_token) * max_length)


def _real(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0.0)


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    """(N, T) -> (N,); 0 for a row without a real token."""
    return _real(values, mask).sum(-1) / mask.sum(-1).clamp(min=1)


def _but(how: str, function: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Right for two of the averages, and this function of values, mask and max_length for one."""

    # A default, because a string in the closure would count as data read from the notebook.
    def answer(x: Tensor, mask: Tensor, asked: str, length: int, how: str = how) -> Tensor:
        return function(x, mask, length) if asked == how else average(x, mask, asked, length)

    return answer


def _mask_not_used(x: Tensor, mask: Tensor, how: str, length: int) -> Tensor:
    return average(x, torch.ones_like(mask), how, length)


def _denominator_only(x: Tensor, mask: Tensor, how: str, length: int) -> Tensor:
    if how == "sequence_mean":
        return (x.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    return x.sum() / (mask.sum() if how == "token_mean" else len(x) * length)


def _width_in_both(x: Tensor, mask: Tensor, how: str, length: int) -> Tensor:
    return average(_real(x, mask), torch.ones_like(mask), how, length)


def _one_at_a_time(x: Tensor, mask: Tensor, how: str, length: int) -> Tensor:
    rows = [row[m] for row, m in zip(x, mask.bool(), strict=True)]
    if how == "sequence_mean":
        return sum(row.mean() for row in rows if len(row)) / len(rows)
    total = sum(row.sum() for row in rows)
    return total / (mask.sum() if how == "token_mean" else len(rows) * length)


# One table for all three: 2.5, 2.125 and 0.425.
TABLE = torch.tensor(
    [
        [2.0, 4.0, NAN, 7.0, INF],
        [1.0, 2.0, -4.0, 9.0, -3.0],
        [6.0, -INF, NAN, 3.0, 5.0],
        [NAN, 8.0, 9.0, INF, 1.0],
    ]
)
RAGGED = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])

AVERAGE = Exercise(
    key="4.2",
    title="three averages",
    reference=average,
    imports=("import torch",),
    package=lambda x, mask, how, length: objective.aggregate(x, mask, how=how, max_length=length),
    others=(
        Answer(
            "row by row",
            _one_at_a_time,
            "pick the real tokens of each row with row[mask]; an empty row adds nothing.",
        ),
        Answer(
            "one weight per token",
            lambda x, mask, how, length: (
                _real(x, mask)
                / {
                    "sequence_mean": len(x) * mask.sum(-1, keepdim=True).clamp(min=1),
                    "token_mean": mask.sum(),
                    "constant": torch.tensor(len(x) * length),
                }[how]
            ).sum(),
            "one sum of all real tokens; the three differ only in what each token is divided by.",
        ),
    ),
    wrong=(
        Answer(
            "mask not used",
            _mask_not_used,
            "The mask is not used: what stands after the end of a row is averaged like text.",
        ),
        Answer(
            "mask in the denominator only",
            _denominator_only,
            "You divide by the number of real tokens, but your sum still runs over the padding. "
            "The mask belongs above the line too.",
        ),
        Answer(
            "mask in the sum only",
            _width_in_both,
            "You sum over the real tokens, but divide by all positions, padding included: one "
            "long row in the batch makes all the others count less. Divide by the real tokens.",
        ),
        Answer(
            "times the mask",
            lambda x, mask, how, length: (
                ((x * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
                if how == "sequence_mean"
                else (x * mask).sum() / (mask.sum() if how == "token_mean" else len(x) * length)
            ),
            "You multiply by the mask. That works until something infinite or NaN stands under a "
            "0, because 0 * inf is NaN. Choose with torch.where instead.",
        ),
        Answer(
            "sequence_mean: empty row divided by 0",
            _but("sequence_mean", lambda x, m, _: (_real(x, m).sum(-1) / m.sum(-1)).mean()),
            "A row without a real token is divided by 0, and 0/0 is NaN: one such row spoils the "
            "whole batch. Divide by at least 1, for instance with .clamp(min=1).",
        ),
        Answer(
            "sequence_mean: empty rows dropped",
            _but("sequence_mean", lambda x, m, _: _row_means(x, m)[m.bool().any(-1)].mean()),
            "In sequence_mean you leave rows without a real token out of the mean. They count as "
            "0 here and stay in N.",
        ),
        Answer(
            "sequence_mean: sum of the row means",
            _but("sequence_mean", lambda x, m, _: _row_means(x, m).sum()),
            "In sequence_mean you add the means of the rows: a batch twice as large would take "
            "steps twice as long. Take the mean over the rows as well.",
        ),
        Answer(
            "sequence_mean: mean of the row sums",
            _but("sequence_mean", lambda x, m, _: _real(x, m).sum(-1).mean()),
            "In sequence_mean you do not divide by the length of each row. First the mean of each "
            "row over its real tokens, then the mean of the rows.",
        ),
        Answer(
            "sequence_mean: rows divided by the width",
            _but("sequence_mean", lambda x, m, _: _real(x, m).mean()),
            "In sequence_mean you divide each row by the width of the batch. Divide it by the "
            "number of its own real tokens.",
        ),
        Answer(
            "sequence_mean: one mean over all tokens",
            _but("sequence_mean", lambda x, m, _: average(x, m, "token_mean", 1)),
            "Your sequence_mean is one mean over all tokens, so long rows weigh more. Every row "
            "has the same weight here: average within each row first.",
        ),
        Answer(
            "sequence_mean: one number per row",
            _but("sequence_mean", lambda x, m, _: _row_means(x, m)),
            "Your sequence_mean stops at one number per row. Average the rows as well.",
        ),
        Answer(
            "token_mean: mean of the row means",
            _but("token_mean", lambda x, m, _: _row_means(x, m).mean()),
            "Your token_mean is a mean of row means, so the tokens of short rows weigh more. "
            "Every token has the same weight here: one sum, divided by the number of real tokens.",
        ),
        Answer(
            "token_mean: divided by all positions",
            _but("token_mean", lambda x, m, _: _real(x, m).mean()),
            "In token_mean you divide by all positions of the batch. Count only the real ones.",
        ),
        Answer(
            "token_mean: divided by the rows",
            _but("token_mean", lambda x, m, _: _real(x, m).sum() / len(x)),
            "In token_mean you divide by the number of rows. Divide by the number of real tokens.",
        ),
        Answer(
            "token_mean: plain sum",
            _but("token_mean", lambda x, m, _: _real(x, m).sum()),
            "In token_mean nothing is divided. Divide the sum by the number of real tokens.",
        ),
        Answer(
            "the two means exchanged",
            lambda x, mask, how, length: average(
                x,
                mask,
                {"sequence_mean": "token_mean", "token_mean": "sequence_mean"}.get(how, how),
                length,
            ),
            "You have exchanged the two means. sequence_mean gives every row the same weight, "
            "token_mean every token.",
        ),
        Answer(
            "constant: width of the batch",
            _but("constant", lambda x, m, _: _real(x, m).sum() / x.numel()),
            "In constant you divide by the width of this batch. It changes with the longest row, "
            "and the loss of every other row with it. Use max_length, which never changes.",
        ),
        Answer(
            "constant: number of tokens",
            _but("constant", lambda x, m, _: average(x, m, "token_mean", 1)),
            "In constant you divide by the number of real tokens: that is token_mean. Divide by "
            "N * max_length, whatever the rows are like.",
        ),
        Answer(
            "constant: without max_length",
            _but("constant", lambda x, m, _: _real(x, m).sum() / len(x)),
            "In constant you divide by the number of rows alone. Divide by max_length as well.",
        ),
        Answer(
            "constant: without N",
            _but("constant", lambda x, m, length: _real(x, m).sum() / length),
            "In constant you divide by max_length alone, so the loss grows with the number of "
            "rows. Divide by N as well.",
        ),
        Answer(
            "constant: row means",
            _but("constant", lambda x, m, length: _row_means(x, m).mean() / length),
            "In constant you divide each row by its length before max_length. The length of the "
            "row must not enter at all, that is the point of a constant: sum, and divide once.",
        ),
        Answer(
            "constant: empty rows dropped",
            _but(
                "constant",
                lambda x, m, length: _real(x, m).sum() / (m.bool().any(-1).sum() * length),
            ),
            "In constant you count only the rows that have a real token. All N rows count.",
        ),
        Answer(
            "detached",
            lambda x, mask, how, length: average(x.detach(), mask, how, length),
            "The numbers are right, but the gradient is cut off, and a loss without one teaches "
            "nothing.",
        ),
    ),
    cases=(
        Case("sequence_mean, ragged rows", (TABLE, RAGGED, "sequence_mean", 10)),
        # A bool mask, as `sample` returns it.
        Case("token_mean, ragged rows", (TABLE, RAGGED.bool(), "token_mean", 10)),
        Case("constant, ragged rows", (TABLE, RAGGED.bool(), "constant", 10)),
    ),
    hints=(
        "What may stand under the mask, and what must it not reach? Replace it first.",
        "kept = torch.where(mask.bool(), per_token, 0.0). All three are sums of kept; they differ "
        "in what is divided by, and when.",
        "sequence_mean: kept.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1), then .mean(). "
        "token_mean: kept.sum() / mask.sum(). constant: kept.sum() / (N * max_length).",
    ),
    gradient=(0,),
)


# 4.3 ----------------------------------------------------------------------------------------


def token_loss(log_probs, old_log_probs, advantages, mask, low, high):
    """log_probs, old_log_probs, mask (N, T), advantages (N,), low, high numbers -> scalar ()"""
    real = mask.bool()
    ratio = torch.where(real, log_probs - old_log_probs, 0.0).exp()  # (N, T), new over old
    A = advantages[:, None]  # (N, 1): the same for every token of a row
    objective = torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    row_means = torch.where(real, objective, 0.0).sum(dim=-1) / real.sum(dim=-1).clamp(min=1)
    return -row_means.mean()


def _ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """(N, T), new over old; 1 where masked."""
    return (_real(new, mask) - _real(old, mask)).exp()


def _clipped(ratio: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


def _token_objective(
    new: Tensor, old: Tensor, adv: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    """(N, T); the advantage itself where masked."""
    return _clipped(_ratio(new, old, mask), adv[:, None], low, high)


def _of_ratio(
    function: Callable[[Tensor, Tensor, float, float], Tensor],
) -> Callable[..., Tensor]:
    """The loss with this function of ratio (N, T), advantages (N, 1), low and high inside."""
    return lambda new, old, adv, mask, low, high: (
        -_row_means(function(_ratio(new, old, mask), adv[:, None], low, high), mask).mean()
    )


def _with_ratio(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The loss with this function of new, old and mask as the ratio, (N, T) or (N, 1)."""
    return lambda new, old, adv, mask, low, high: (
        -_row_means(
            _clipped(function(new, old, mask), adv[:, None], low, high).expand_as(new), mask
        ).mean()
    )


def _averaged(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The loss with this function of objective (N, T) and mask at the end."""
    return lambda new, old, adv, mask, low, high: (
        -function(_token_objective(new, old, adv, mask, low, high), mask)
    )


# Ratios beyond the bounds and within, under both signs; as many rows as tokens, so that an
# advantage laid along the wrong axis is not refused.
RATIOS = torch.tensor(
    [[0.5, 1.5, 1.0, 1.1], [0.5, 1.5, 0.9, 1.0], [0.7, 1.3, 2.5, 1.5], [0.7, 1.3, 1.7, 0.95]]
)
OLD = torch.tensor(
    [[0.4, 0.2, 0.6, 0.3], [0.8, 0.5, 0.1, 0.7], [0.9, 0.3, 0.2, 0.5], [0.6, 0.7, 0.1, 0.4]]
).log()

TOKEN_LOSS = Exercise(
    key="4.3",
    title="clipped token loss",
    reference=token_loss,
    imports=("import torch",),
    package=lambda new, old, adv, mask, low, high: objective.grpo_loss(
        new, old, adv, mask, clip=(low, high)
    )[0],
    others=(
        Answer(
            "larger of two losses",
            lambda new, old, adv, mask, low, high: _row_means(
                torch.maximum(
                    -adv[:, None] * _ratio(new, old, mask),
                    -adv[:, None] * _ratio(new, old, mask).clamp(1 - low, 1 + high),
                ),
                mask,
            ).mean(),
            "the minus first: the minimum of two objectives is the maximum of two losses.",
        ),
        Answer(
            "row by row",
            lambda new, old, adv, mask, low, high: (
                -torch.stack(
                    [
                        _clipped((n[m] - o[m]).exp(), a, low, high).mean()
                        for n, o, a, m in zip(new, old, adv, mask.bool(), strict=True)
                    ]
                ).mean()
            ),
            "pick the real tokens of each row with row[mask], and take the mean of each row.",
        ),
    ),
    wrong=(
        Answer(
            "one ratio per row",
            _with_ratio(lambda new, old, m: (_ratio(new, old, m).log().sum(-1, True)).exp()),
            "You clip one ratio per completion, the product over its tokens. That is the loss of "
            "notebook 03. Here every token has its own ratio, and its own clip.",
        ),
        Answer(
            "length-normalised ratio",
            _with_ratio(lambda new, old, m: _row_means(new - old, m).exp()[:, None]),
            "You take one ratio per completion, the geometric mean of its tokens' ratios: that is "
            "GSPO. Here every token has its own ratio, and its own clip.",
        ),
        Answer(
            "mean of the ratios, then clip",
            _with_ratio(lambda new, old, m: _row_means(_ratio(new, old, m), m)[:, None]),
            "You average the ratios of a row and clip then: a token far out of bounds hides behind "
            "the others. Clip every token's own ratio, and average the objective.",
        ),
        Answer(
            "old over new",
            _with_ratio(lambda new, old, m: 1 / _ratio(new, old, m)),
            "This ratio is old over new: making a good token likelier makes it smaller. It is new "
            "over old, log_probs - old_log_probs in the exponent.",
        ),
        Answer(
            "log-ratio instead of ratio",
            _with_ratio(lambda new, old, m: _real(new, m) - _real(old, m)),
            "The exp is missing: you clip the log-ratio, which is 0, not 1, when nothing has "
            "changed.",
        ),
        Answer(
            "new over itself",
            _with_ratio(lambda new, old, m: _ratio(new, new.detach(), m)),
            "You divide the new policy by itself, so the ratio is always 1 and nothing is ever "
            "clipped. That is right for the first update only; use old_log_probs.",
        ),
        Answer(
            "log-probs instead of a ratio",
            lambda new, old, adv, mask, low, high: -_row_means(new * adv[:, None], mask).mean(),
            "There is no ratio: you weight the log-probs with the advantages (REINFORCE). At the "
            "first update that has the same gradient, but later nothing corrects for the old "
            "policy, and nothing is clipped.",
        ),
        Answer(
            "no clip",
            _of_ratio(lambda ratio, A, low, high: ratio * A),
            "Nothing is clipped: the further a token moves, the more it is praised for it.",
        ),
        Answer(
            "maximum",
            _of_ratio(
                lambda ratio, A, low, high: torch.maximum(
                    ratio * A, ratio.clamp(1 - low, 1 + high) * A
                )
            ),
            "You take the larger of the two objectives, the optimistic one: moves the wrong way "
            "are no longer corrected, and moves too far never stop. Take the minimum. (The "
            "maximum is right of two losses, with the minus before it is taken.)",
        ),
        Answer(
            "clamp alone",
            _of_ratio(lambda ratio, A, low, high: ratio.clamp(1 - low, 1 + high) * A),
            "You clamp and take no minimum. A token that has moved the wrong way (ratio 0.5 with a "
            "positive advantage) then has gradient 0, and cannot come back.",
        ),
        Answer(
            "wrong side for negative advantages",
            _of_ratio(
                lambda ratio, A, low, high: torch.minimum(ratio, ratio.clamp(1 - low, 1 + high)) * A
            ),
            "A negative advantage is clipped on the wrong side, as by torch.where(A >= 0, minimum, "
            "maximum): at ratio 0.5 you still push down, and at ratio 1.5 you no longer pull back. "
            "The minimum of the two products is right for both signs.",
        ),
        Answer(
            "low and high swapped",
            lambda new, old, adv, mask, low, high: token_loss(new, old, adv, mask, high, low),
            "low and high have changed places. The ratio may go down to 1 - low and up to "
            "1 + high.",
        ),
        Answer(
            "low on both sides",
            lambda new, old, adv, mask, low, high: token_loss(new, old, adv, mask, low, low),
            "You use low on both sides. The upper bound is 1 + high.",
        ),
        Answer(
            "bounds without the one",
            _of_ratio(
                lambda ratio, A, low, high: torch.minimum(ratio * A, ratio.clamp(-low, high) * A)
            ),
            "You clamp between -low and high. A ratio is 1 when nothing has changed, so the "
            "bounds lie around 1: from 1 - low to 1 + high.",
        ),
        Answer(
            "bounds of 0.2 and 0.4",
            lambda new, old, adv, mask, low, high: token_loss(new, old, adv, mask, 0.2, 0.4),
            "The bounds are written into your function. Use the arguments low and high.",
        ),
        Answer(
            "advantages along the wrong axis",
            lambda new, old, adv, mask, low, high: (
                -_row_means(_clipped(_ratio(new, old, mask), adv, low, high), mask).mean()
            ),
            "You multiply (N, T) by (N,): torch lays the advantages along the tokens, which fails, "
            "or where N happens to equal T goes wrong without a word. Each row has one advantage: "
            "advantages[:, None].",
        ),
        Answer(
            "objective instead of loss",
            _averaged(lambda x, mask: -_row_means(x, mask).mean()),
            "The minus is missing: this is the objective. An optimiser minimises, so it would make "
            "the bad tokens likelier.",
        ),
        Answer(
            "token mean",
            _averaged(logprobs.masked_mean),
            "You average over all tokens of the batch at once, so long rows weigh more. That is "
            "the token mean of DAPO; here each row is averaged first, then the rows.",
        ),
        Answer(
            "rows summed, not averaged",
            _averaged(lambda x, mask: _real(x, mask).sum(-1).mean()),
            "You add up the tokens of a row and never divide by its length. Take the mean over "
            "its real tokens.",
        ),
        Answer(
            "sum over the rows",
            _averaged(lambda x, mask: _row_means(x, mask).sum()),
            "You add the rows: a batch twice as large would take steps twice as long. Take their "
            "mean.",
        ),
        Answer(
            "one number per row",
            _averaged(_row_means),
            "You return a loss for every row. One number is asked for: their mean.",
        ),
        Answer(
            "padding in the denominator",
            _averaged(lambda x, mask: _real(x, mask).mean()),
            "You divide by the width of the batch, padding included, so short rows teach less. "
            "Divide each row by the number of its real tokens.",
        ),
        Answer(
            "padding in the sum",
            _averaged(lambda x, mask: (x.sum(-1) / mask.sum(-1)).mean()),
            "You divide by the real tokens, but sum over the padding too: under the mask the ratio "
            "is 1, so every padding position adds an advantage. Mask the objective as well.",
        ),
        Answer(
            "padding averaged",
            _averaged(lambda x, mask: x.mean()),
            "You average over all positions: under the mask the ratio is 1, so every padding "
            "position counts as a token with that advantage. Mask the objective, and divide by "
            "the number of real tokens.",
        ),
        Answer(
            "mask not used",
            lambda new, old, adv, mask, low, high: token_loss(
                new, old, adv, torch.ones_like(mask), low, high
            ),
            "The mask is not used: what stands after the end of a row is trained like text.",
        ),
        Answer(
            "times the mask",
            lambda new, old, adv, mask, low, high: (
                -(
                    (_clipped((new - old).exp(), adv[:, None], low, high) * mask).sum(-1)
                    / mask.sum(-1)
                ).mean()
            ),
            "You multiply by the mask, and 0 * NaN is NaN. Choose with torch.where instead, before "
            "the exp.",
        ),
        Answer(
            "masked at the end",
            lambda new, old, adv, mask, low, high: (
                -_row_means(_clipped((new - old).exp(), adv[:, None], low, high), mask).mean()
            ),
            "You choose with torch.where, but only at the end. The value is right; the gradient "
            "goes back through the exp of the garbage, and 0 * NaN is NaN. Mask the log-ratio, "
            "before the exp.",
        ),
        Answer(
            "detached",
            lambda new, old, adv, mask, low, high: token_loss(
                new.detach(), old, adv, mask, low, high
            ),
            "The number is right, but the ratio is cut off from the policy, and it is only "
            "through the ratio that the policy learns.",
        ),
    ),
    cases=(
        Case(
            "beyond the bounds, both signs",
            (OLD + RATIOS.log(), OLD, torch.tensor([1.0, -1.0, 2.0, -0.5]), torch.ones(4, 4))
            + (0.2, 0.4),
        ),
        Case(
            "ragged rows, garbage after the end",
            (
                torch.tensor([[-1.0, -2.0, NAN, -1.0], [-3.0, -INF, INF, NAN], [-1.5, -1, -2, 0]]),
                torch.tensor([[-1.75, -1.5, 0.0, INF], [-3.1, NAN, -1.0, -2.0], [-1.4, -2, -2, 9]]),
                torch.tensor([1.0, -1.5, 0.5]),
                torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]).bool(),
                0.2,
                0.4,
            ),
        ),
        Case(
            "tighter bounds",
            (
                torch.tensor([[0.54, 0.34, 0.3], [0.38, 0.42, 0.5]]).log(),
                torch.tensor([[0.4, 0.4, 0.3], [0.4, 0.4, 0.5]]).log(),
                torch.tensor([1.0, -1.0]),
                torch.ones(2, 3, dtype=torch.long),
                0.1,
                0.3,
            ),
        ),
    ),
    hints=(
        "What has changed since exercise 3.5? How many ratios are there now, and how many "
        "advantages?",
        "ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0).exp() is (N, T), and "
        "advantages[:, None] is (N, 1): the objective of notebook 03 works on them as it is.",
        "Then sequence_mean, as in 4.2: mask the objective, sum each row, divide by its number of "
        "real tokens, take the mean of the rows; and the minus.",
    ),
    gradient=(0,),
)


# 4.4 ----------------------------------------------------------------------------------------


def corrected_kl(log_probs, old_log_probs, ref_log_probs, mask):
    """log_probs, old_log_probs, ref_log_probs, mask (N, T) -> (N, T), 0 where masked"""
    real = mask.bool()
    x = torch.where(real, ref_log_probs - log_probs, 0.0)  # reference over policy
    ratio = torch.where(real, log_probs - old_log_probs, 0.0).exp()  # policy over old
    return ratio * (x.exp() - x - 1)


def _k3(x: Tensor) -> Tensor:
    return x.exp() - x - 1


def _kl(new: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    return _k3(_real(ref, mask) - _real(new, mask))


def _times_ratio(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The ratio times this function of ref - new, both masked before."""
    return lambda new, old, ref, mask: (
        _ratio(new, old, mask) * _real(function(_real(ref, mask) - _real(new, mask)), mask)
    )


def _times_kl(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """k3 times this function of new, old and mask."""
    return lambda new, old, ref, mask: function(new, old, mask) * _kl(new, ref, mask)


CORRECTED_KL = Exercise(
    key="4.4",
    title="KL with the right gradient",
    reference=corrected_kl,
    imports=("import torch",),
    package=lambda new, old, ref, mask: (
        objective.kl_estimate(_real(new, mask), _real(ref, mask))
        * objective.policy_ratio(new, old, mask)
    ),
    others=(
        Answer(
            "multiplied out",
            lambda new, old, ref, mask: _real(
                _ratio(ref, old, mask)
                + _ratio(new, old, mask) * (_real(new, mask) - _real(ref, mask) - 1),
                mask,
            ),
            "multiplied out: ref over old, plus new over old times (new - ref - 1).",
        ),
    ),
    wrong=(
        Answer(
            "no ratio",
            lambda new, old, ref, mask: _kl(new, ref, mask),
            "That is k3 alone. At the first update its value is right, but its gradient, averaged "
            "over the policy's own samples, is that of KL(reference || policy), the other "
            "direction; and later it forgets that the old policy drew the tokens. Multiply by the "
            "ratio.",
        ),
        Answer(
            "ratio detached",
            _times_kl(lambda new, old, m: _ratio(new, old, m).detach()),
            "The value is right, but your ratio is a constant. Half of the gradient comes through "
            "the ratio: how the policy changes which tokens are drawn. Leave it attached.",
        ),
        Answer(
            "k3 detached",
            lambda new, old, ref, mask: _ratio(new, old, mask) * _kl(new, ref, mask).detach(),
            "The value is right, but k3 is a constant in your product. The gradient comes through "
            "both factors. Leave both attached.",
        ),
        Answer(
            "detached",
            lambda new, old, ref, mask: corrected_kl(new, old, ref, mask).detach(),
            "The number is right, but the gradient is cut off: a penalty that pulls nowhere.",
        ),
        Answer(
            "old over new",
            _times_kl(lambda new, old, m: _ratio(old, new, m)),
            "Your ratio is old over new. The tokens were drawn by the old policy; to count them as "
            "the new one would have drawn them, multiply by new over old.",
        ),
        Answer(
            "new over itself",
            _times_kl(lambda new, old, m: _ratio(new, new.detach(), m)),
            "You divide the new policy by itself. That has the right gradient at the first update "
            "only; from the second on the tokens are old: use old_log_probs.",
        ),
        Answer(
            "log-ratio instead of ratio",
            _times_kl(lambda new, old, m: _real(new, m) - _real(old, m)),
            "You multiply by the log-ratio, which is 0 when nothing has changed: the penalty "
            "vanishes at the first update. Take its exp.",
        ),
        Answer(
            "new over reference",
            lambda new, old, ref, mask: _ratio(new, ref, mask) * _kl(new, ref, mask),
            "Your ratio is new over reference. The reference has not drawn the tokens, the old "
            "policy has: new over old.",
        ),
        Answer(
            "one ratio per row",
            _times_kl(lambda new, old, m: (_real(new, m) - _real(old, m)).sum(-1, True).exp()),
            "You multiply with one ratio per completion, the product over its tokens. Here each "
            "token has its own: exp(log_probs - old_log_probs), without a sum.",
        ),
        Answer(
            "clipped ratio",
            _times_kl(lambda new, old, m: _ratio(new, old, m).clamp(0.8, 1.2)),
            "You clip the ratio. The clip belongs to the objective; beyond it the KL would lose "
            "the part of its gradient that comes through the ratio.",
        ),
        Answer(
            "old instead of reference",
            lambda new, old, ref, mask: _ratio(new, old, mask) * _kl(new, old, mask),
            "You measure the distance from the old policy, and the reference enters nowhere: "
            "nothing holds the policy where it started. The log-ratio inside k3 is ref - new.",
        ),
        Answer(
            "wrong way round",
            _times_ratio(lambda x: _k3(-x)),
            "Inside k3 the log-ratio is upside down. The reference goes on top: "
            "exp(ref - new) - (ref - new) - 1. The mean of yours is no KL.",
        ),
        Answer(
            "k1",
            _times_ratio(lambda x: -x),
            "You multiply k1, the plain log-ratio new - ref, by the ratio. In the mean that has "
            "the same value and the same gradient, but token by token it is negative and noisy. "
            "Here k3 is asked for.",
        ),
        Answer(
            "k2",
            lambda new, old, ref, mask: (_real(ref, mask) - _real(new, mask)).square() / 2,
            "Half the square of the log-ratio is k2. At the first update it has the gradient that "
            "is wanted, but neither the value nor the ratio. Here it is the ratio times k3.",
        ),
        Answer(
            "k2 times the ratio",
            _times_ratio(lambda x: x.square() / 2),
            "You multiply k2, half the square of the log-ratio, by the ratio. That is the right "
            "correction of another estimator: k2 is biased, and so is its corrected gradient. "
            "Take k3.",
        ),
        Answer(
            "minus one forgotten",
            _times_ratio(lambda x: x.exp() - x),
            "The - 1 of k3 is missing: two equal policies are not at distance 0.",
        ),
        Answer(
            "log-ratio added",
            _times_ratio(lambda x: x.exp() + x - 1),
            "Inside k3 you add the log-ratio ref - new, and it must be subtracted: only then is "
            "the result never negative.",
        ),
        Answer(
            "ratio added",
            lambda new, old, ref, mask: _real(_ratio(new, old, mask) + _kl(new, ref, mask), mask),
            "You add the ratio to k3. It is a weight: multiply.",
        ),
        Answer(
            "clamped",
            lambda new, old, ref, mask: (
                _ratio(new, old, mask) * _kl(new, ref, mask).clamp(max=10.0)
            ),
            "You cap the KL. Above the cap only the ratio is left in the gradient, and it pushes "
            "a token that the policy has almost lost further down. Leave k3 as it is.",
        ),
        Answer(
            "times the mask",
            lambda new, old, ref, mask: (new - old).exp() * _k3(ref - new) * mask,
            "You multiply by the mask. That works until something infinite or NaN stands under a "
            "0, because 0 * inf is NaN. Choose with torch.where instead, before the exp.",
        ),
        Answer(
            "masked at the end",
            lambda new, old, ref, mask: _real((new - old).exp() * _k3(ref - new), mask),
            "You choose with torch.where, but only at the end. The value is right; the gradient "
            "goes back through the exp of the garbage, and 0 * NaN is NaN. Mask both log-ratios, "
            "before the exp.",
        ),
        Answer(
            "mask not used",
            lambda new, old, ref, mask: (new - old).exp() * _k3(ref - new),
            "The mask is not used: what stands after the end of a row enters the penalty.",
        ),
        Answer(
            "summed over the tokens",
            lambda new, old, ref, mask: corrected_kl(new, old, ref, mask).sum(-1),
            "You sum over the tokens already. One number per token is asked for.",
        ),
        Answer(
            "mean over the tokens",
            lambda new, old, ref, mask: logprobs.masked_mean(
                corrected_kl(new, old, ref, mask), mask
            ),
            "You average already. One number per token is asked for, (N, T).",
        ),
    ),
    cases=(
        Case(
            "the first update, garbage after the end",
            (
                torch.tensor([[-1.0, -2.0, -0.5, NAN], [-3.0, -INF, -1.0, INF]]),
                torch.tensor([[-1.0, -2.0, -0.5, -1.0], [-3.0, NAN, -INF, -1.0]]),
                torch.tensor([[-1.5, -1.0, -0.5, INF], [-2.75, -1.0, NAN, -2.0]]),
                torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool(),  # as `sample` returns it
            ),
        ),
        Case(
            "a later update",
            (
                torch.tensor([[0.4, 0.25, 0.5], [0.1, 0.6, 0.3]]).log(),
                torch.tensor([[0.2, 0.5, 0.4], [0.1, 0.3, 0.9]]).log(),
                torch.tensor([[0.2, 0.5, 0.5], [0.3, 0.9, 0.2]]).log(),
                torch.ones(2, 3, dtype=torch.long),
            ),
        ),
        Case(
            "the policy has almost lost a token",
            (
                torch.tensor([[-8.0, -6.0]]),
                torch.tensor([[-8.0, -6.0]]),
                torch.tensor([[-0.5, -1.0]]),
                torch.ones(1, 2),
            ),
        ),
    ),
    hints=(
        "The tokens were drawn from the policy. If it changes, what changes beside k3 itself?",
        "Multiply k3 by exp(log_probs - old_log_probs): its value at the first update is 1, but "
        "its gradient is not 0. Do not detach it.",
        "Mask both log-ratios with torch.where before the exp: x = ref - new for k3, new - old "
        "for the ratio. Then ratio * (x.exp() - x - 1).",
    ),
    gradient=(0,),
)


# 4.5 ----------------------------------------------------------------------------------------


def entropy_bonus(logits, mask):
    """logits (N, T, V), mask (N, T) -> scalar (), in nats"""
    log_p = logits.log_softmax(dim=-1)  # (N, T, V)
    finite = torch.where(log_p.isneginf(), 0.0, log_p)  # 0 * -inf would be NaN
    entropy = -(log_p.exp() * finite).sum(dim=-1)  # (N, T)
    real = mask.bool()
    return torch.where(real, entropy, 0.0).sum() / real.sum()


def _of_logits(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean over the real positions of this function (N, T, V) -> (N, T)."""
    return lambda logits, mask: logprobs.masked_mean(function(logits), mask)


def _plogp(log_p: Tensor, log: Tensor) -> Tensor:
    """p times a logarithm, and 0 where p is 0, in the gradient too."""
    return log_p.exp() * torch.where(log_p.isneginf(), 0.0, log)


def _normaliser_by_hand(logits: Tensor) -> Tensor:
    return logits - logits.exp().sum(-1, keepdim=True).log()


def _softmax_over(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda z: -_plogp(z.log_softmax(dim), z.log_softmax(dim)).sum(-1)


ENTROPY_BONUS = Exercise(
    key="4.5",
    title="entropy bonus",
    reference=entropy_bonus,
    imports=("import torch",),
    package=lambda logits, mask: logprobs.masked_mean(logprobs.token_entropy(logits), mask),
    others=(
        Answer(
            "torch's own distribution",
            lambda logits, mask: (
                torch.distributions.Categorical(logits=logits).entropy()[mask.bool()].mean()
            ),
            "torch.distributions.Categorical(logits=logits).entropy(), where the mask is 1.",
        ),
        Answer(
            "normaliser minus mean logit",
            _of_logits(
                lambda z: (
                    z.logsumexp(-1) - (z.softmax(-1) * z.masked_fill(z.isneginf(), 0.0)).sum(-1)
                )
            ),
            "logsumexp of the logits minus their mean under the softmax.",
        ),
    ),
    wrong=(
        Answer(
            "0 * -inf",
            _of_logits(lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)),
            "The formula is right, but a token with logit -inf has p = 0 and log p = -inf, and "
            "0 * -inf is NaN. Put a finite number in place of that logarithm before you multiply.",
        ),
        Answer(
            "NaN replaced afterwards",
            _of_logits(lambda z: -(z.softmax(-1) * z.log_softmax(-1)).nan_to_num(0.0).sum(-1)),
            "You replace the NaN of 0 * -inf after it has arisen. The value is right, but the "
            "gradient goes back through the product and is NaN. Replace the infinite logarithm "
            "before you multiply.",
        ),
        Answer(
            "zero probabilities skipped",
            _of_logits(lambda z: torch.special.entr(z.softmax(-1)).sum(-1)),
            "You get 0 where a probability is 0, so the value is right. But you start from the "
            "probabilities, and the gradient of their logarithm at 0 is infinite: the softmax "
            "makes NaN of it. Start from log_softmax, and replace the infinite logarithms.",
        ),
        Answer(
            "logarithm of the softmax",
            _of_logits(lambda z: -(z.softmax(-1) * z.softmax(-1).log()).sum(-1)),
            "You take the softmax and then its logarithm. A small probability underflows to 0, a "
            "forbidden token has it from the start, and 0 * -inf is NaN. Start from log_softmax, "
            "and replace the infinite logarithms that are left.",
        ),
        Answer(
            "exp without protection",
            _of_logits(lambda z: -_plogp(_normaliser_by_hand(z), _normaliser_by_hand(z)).sum(-1)),
            "You take exp of the logits as they are. A logit of 1000 overflows to infinity: "
            "log_softmax subtracts the largest one first.",
        ),
        Answer(
            "detached",
            lambda logits, mask: entropy_bonus(logits.detach(), mask),
            "The number is right, but its gradient is cut off: as a metric that will do, as a "
            "bonus it has no effect at all. Is there a detach or a no_grad?",
        ),
        Answer(
            "sign",
            lambda logits, mask: -entropy_bonus(logits, mask),
            "The sign is wrong: log p is negative, so the minus before the sum makes the entropy "
            "positive. (The loss subtracts the bonus; here the entropy itself is asked for.)",
        ),
        Answer(
            "bits",
            lambda logits, mask: entropy_bonus(logits, mask) / math.log(2),
            "That is in bits (log2). The course counts in nats: use the natural logarithm.",
        ),
        Answer(
            "mean over the vocabulary",
            _of_logits(lambda z: logprobs.token_entropy(z) / z.shape[-1]),
            "You average p log p over the vocabulary. It is weighted with p already: sum. With "
            "the mean the bonus would shrink as the vocabulary grows.",
        ),
        Answer(
            "every token the same weight",
            _of_logits(lambda z: -z.log_softmax(-1).mean(-1)),
            "You average -log p over the vocabulary with equal weights, and so tokens that are "
            "never drawn dominate. Weight each with its probability: p log p, summed.",
        ),
        Answer(
            "the likeliest token only",
            _of_logits(lambda z: -z.log_softmax(-1).amax(-1)),
            "That is the surprise at the likeliest token alone. Entropy is the mean surprise over "
            "the whole vocabulary, weighted with the probabilities.",
        ),
        Answer(
            "logits instead of log-probs",
            _of_logits(lambda z: -(z.softmax(-1) * z.masked_fill(z.isneginf(), 0.0)).sum(-1)),
            "You multiply the probabilities by the logits. These are not normalised: add a "
            "constant to all, and the result changes. Take log_softmax.",
        ),
        Answer(
            "over the positions",
            _of_logits(_softmax_over(1)),
            "The softmax runs over the positions. Each position has a distribution over the "
            "vocabulary, the last dimension.",
        ),
        Answer(
            "perplexity",
            _of_logits(lambda z: logprobs.token_entropy(z).exp()),
            "You take exp of the entropy: that counts how many tokens the policy hesitates "
            "between. The entropy itself is asked for.",
        ),
        Answer(
            "divided by its maximum",
            _of_logits(lambda z: logprobs.token_entropy(z) / math.log(z.shape[-1])),
            "You divide by ln V, the largest entropy there can be. It is asked for in nats.",
        ),
        Answer(
            "mask not used",
            lambda logits, mask: logprobs.token_entropy(logits).mean(),
            "The mask is not used: the policy would be paid for hesitating after the end of a row.",
        ),
        Answer(
            "padding in the denominator",
            lambda logits, mask: _real(logprobs.token_entropy(logits), mask).mean(),
            "You sum over the real positions but divide by all of them, padding included: the "
            "bonus would shrink with the longest row. Divide by the number of real positions.",
        ),
        Answer(
            "row means",
            lambda logits, mask: _row_means(logprobs.token_entropy(logits), mask).mean(),
            "You average within each row and then over the rows, so the tokens of short rows weigh "
            "more. Here every real position has the same weight.",
        ),
        Answer(
            "sum over the positions",
            lambda logits, mask: _real(logprobs.token_entropy(logits), mask).sum(),
            "You sum over the positions: longer texts would be paid more. Take the mean over the "
            "real ones.",
        ),
        Answer(
            "sum over the tokens, mean over the rows",
            lambda logits, mask: _real(logprobs.token_entropy(logits), mask).sum(-1).mean(),
            "You divide by the number of rows only. Divide by the number of real positions.",
        ),
        Answer(
            "one number per position",
            lambda logits, mask: _real(logprobs.token_entropy(logits), mask),
            "You return the entropy of every position. Average over the real ones.",
        ),
    ),
    cases=(
        Case(
            "ragged rows",
            (
                torch.tensor(
                    [
                        [[0.0, 0.0, 0.0, 0.0], [3.0, 0.0, -1.0, 0.5], [0.2, -0.3, 1.0, 2.0]],
                        [[2.0, 2.0, -1.0, 0.0], [0.5, 0.0, 0.0, 0.0], [4.0, -2.0, 1.0, 0.0]],
                    ]
                ),
                torch.tensor([[1, 1, 1], [1, 0, 0]]),
            ),
        ),
        Case(
            "a forbidden token",
            (
                torch.tensor(
                    [[[1.0, 0.0, -INF], [0.5, -INF, -INF]], [[-INF, 2.0, 1.0], [0, 0, 0]]]
                ),
                torch.ones(2, 2).bool(),  # as `sample` returns it
            ),
        ),
        Case(
            "large logits",
            (torch.tensor([[[1000.0, 1001.0, 998.0], [-1000.0, 0.0, 1.0]]]), torch.ones(1, 2)),
        ),
    ),
    hints=(
        "For one position: with which weight does the surprise -log p of each token enter?",
        "log_p = logits.log_softmax(dim=-1), and -(log_p.exp() * log_p).sum(dim=-1). What does "
        "that give where a logit is -inf?",
        "torch.where(log_p.isneginf(), 0.0, log_p) before the product. Then the mean over the real "
        "positions, as in exercise 4.2 under the name token_mean.",
    ),
    gradient=(0,),
)


# 4.6 ----------------------------------------------------------------------------------------


def grpo_loss(log_probs, old_log_probs, ref_log_probs, advantages, mask, clip, kl_weight):
    """three log-probs and mask (N, T), advantages (N,), clip, kl_weight numbers -> scalar ()"""
    real = mask.bool()
    ratio = torch.where(real, log_probs - old_log_probs, 0.0).exp()  # (N, T), new over old
    A = advantages[:, None]  # (N, 1)
    objective = torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    x = torch.where(real, ref_log_probs - log_probs, 0.0)  # reference over new
    per_token = torch.where(real, kl_weight * (x.exp() - x - 1) - objective, 0.0)
    return (per_token.sum(dim=-1) / real.sum(dim=-1).clamp(min=1)).mean()


def _terms(
    new: Tensor, old: Tensor, ref: Tensor, adv: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Objective and k3, (N, T) both."""
    return _token_objective(new, old, adv, mask, clip, clip), _kl(new, ref, mask)


def _combined(
    function: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor],
) -> Callable[..., Tensor]:
    """The loss as this function of objective, KL, advantages (N, 1), mask and weight."""
    return lambda new, old, ref, adv, mask, clip, weight: function(
        *_terms(new, old, ref, adv, mask, clip), adv[:, None], mask, weight
    )


def _per_token(
    function: Callable[[Tensor, Tensor, Tensor, float], Tensor],
) -> Callable[..., Tensor]:
    """The mean over rows and tokens of this function of objective, KL, advantages and weight."""
    return _combined(
        lambda objective, kl, A, mask, weight: _row_means(
            function(objective, kl, A, weight), mask
        ).mean()
    )


def _with_objective(
    function: Callable[[Tensor, Tensor, float], Tensor],
) -> Callable[..., Tensor]:
    """The loss with this function of ratio (N, T), advantages (N, 1) and clip."""
    return lambda new, old, ref, adv, mask, clip, weight: _row_means(
        weight * _kl(new, ref, mask) - function(_ratio(new, old, mask), adv[:, None], clip), mask
    ).mean()


def _with_penalty(
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Callable[..., Tensor]:
    """The loss with this function of new, old, ref and mask in place of the KL."""
    return lambda new, old, ref, adv, mask, clip, weight: _row_means(
        weight * function(new, old, ref, mask) - _token_objective(new, old, adv, mask, clip, clip),
        mask,
    ).mean()


def _unprotected(
    new: Tensor, old: Tensor, ref: Tensor, adv: Tensor, clip: float, weight: float
) -> Tensor:
    """Loss per token, without a look at the mask."""
    return weight * _k3(ref - new) - _clipped((new - old).exp(), adv[:, None], clip, clip)


GRPO_LOSS = Exercise(
    key="4.6",
    title="the whole loss",
    reference=grpo_loss,
    imports=("import torch",),
    package=lambda new, old, ref, adv, mask, clip, weight: objective.grpo_loss(
        new, old, adv, mask, ref_log_probs=ref, clip=(clip, clip), kl_weight=weight
    )[0],
    others=(
        Answer(
            "two averages",
            lambda new, old, ref, adv, mask, clip, weight: (
                token_loss(new, old, adv, mask, clip, clip)
                + weight * average(_kl(new, ref, mask), mask, "sequence_mean", 1)
            ),
            "the loss of 4.3 plus kl_weight times the sequence_mean of k3: the mean of a sum is "
            "the sum of the means.",
        ),
    ),
    wrong=(
        Answer(
            "KL subtracted from the loss",
            _per_token(lambda obj, kl, A, weight: -obj - weight * kl),
            "You subtract the KL from the loss: the policy is paid for leaving the reference. It "
            "is subtracted from the objective, and so added to the loss.",
        ),
        Answer(
            "objective instead of loss",
            _per_token(lambda obj, kl, A, weight: obj - weight * kl),
            "This is the objective, which is to be maximised. An optimiser minimises: put a minus "
            "before the whole.",
        ),
        Answer(
            "sign of the objective",
            _per_token(lambda obj, kl, A, weight: obj + weight * kl),
            "The KL is right, but the clipped objective enters with a plus: minimising it makes "
            "the bad tokens likelier. Subtract it.",
        ),
        Answer(
            "no KL",
            _per_token(lambda obj, kl, A, weight: -obj),
            "The KL is missing, or nothing of it reaches the loss: kl_weight has no effect.",
        ),
        Answer(
            "KL without its weight",
            _per_token(lambda obj, kl, A, weight: kl - obj),
            "The KL is not multiplied by kl_weight.",
        ),
        Answer(
            "KL detached",
            _per_token(lambda obj, kl, A, weight: weight * kl.detach() - obj),
            "The number is right, but the KL is cut off from the policy: a penalty that pulls "
            "nowhere.",
        ),
        Answer(
            "KL times the advantage",
            _per_token(lambda obj, kl, A, weight: -(obj - weight * kl * A)),
            "You multiply the KL by the advantage. In a row with a negative one it is a reward "
            "for leaving the reference, and with advantage 0 it vanishes. It stands beside the "
            "advantage term, not inside.",
        ),
        Answer(
            "KL towards the old policy",
            _with_penalty(lambda new, old, ref, m: _kl(new, old, m)),
            "Your KL is measured from the old policy, which follows the new one step by step: "
            "nothing holds the policy where it started. Take the reference.",
        ),
        Answer(
            "KL from the log-ratio of the objective",
            _with_penalty(lambda new, old, ref, m: _kl(old, new, m)),
            "Your KL uses the log-ratio new - old of the objective. Two ratios are in play: new "
            "over old in the objective, reference over new in the KL.",
        ),
        Answer(
            "KL between old and reference",
            _with_penalty(lambda new, old, ref, m: _kl(old, ref, m)),
            "Your KL compares the old policy with the reference. The new one, which learns, does "
            "not occur in it, so it has no gradient: reference over new.",
        ),
        Answer(
            "k3 upside down",
            _with_penalty(lambda new, old, ref, m: _kl(ref, new, m)),
            "Inside k3 the log-ratio is upside down. The reference goes on top: "
            "exp(ref - new) - (ref - new) - 1.",
        ),
        Answer(
            "k1",
            _with_penalty(lambda new, old, ref, m: _real(new, m) - _real(ref, m)),
            "You add k1, the plain log-ratio new - ref. As a number its mean is the KL; but as a "
            "loss its gradient is 0 in the mean, so it pulls the policy nowhere and adds noise. "
            "Take k3.",
        ),
        Answer(
            "k2",
            _with_penalty(lambda new, old, ref, m: (_real(new, m) - _real(ref, m)).square() / 2),
            "You add k2, half the square of the log-ratio. It does pull back; but here k3 is asked "
            "for, as in the paper: exp(ref - new) - (ref - new) - 1.",
        ),
        Answer(
            "KL with the ratio",
            _with_penalty(lambda new, old, ref, m: corrected_kl(new, old, ref, m)),
            "You multiply k3 by the ratio, as in exercise 4.4. That is a good idea, but not the "
            "loss of the paper: here k3 stands without it.",
        ),
        Answer(
            "minus one forgotten",
            _with_penalty(lambda new, old, ref, m: _kl(new, ref, m) + 1),
            "The - 1 of k3 is missing. The gradient is right, but with two equal policies the "
            "penalty is not 0.",
        ),
        Answer(
            "KL averaged over the padding too",
            _combined(
                lambda obj, kl, A, mask, weight: weight * kl.mean() - _row_means(obj, mask).mean()
            ),
            "You average the KL over all positions, padding included: the penalty gets weaker when "
            "one row is long. It is averaged like the objective, over the real tokens.",
        ),
        Answer(
            "KL outside the mask",
            lambda new, old, ref, adv, mask, clip, weight: (
                token_loss(new, old, adv, mask, clip, clip) + weight * _k3(ref - new).mean()
            ),
            "The objective is masked, but the KL is not: what stands after the end of a row "
            "enters the penalty. Mask ref - new before the exp, and average over real tokens.",
        ),
        Answer(
            "token mean of the KL",
            _combined(
                lambda obj, kl, A, mask, weight: (
                    weight * logprobs.masked_mean(kl, mask) - _row_means(obj, mask).mean()
                )
            ),
            "The objective is averaged row by row, but the KL over all tokens at once. Both belong "
            "into one mean: add them per token, and average then.",
        ),
        Answer(
            "KL summed over the tokens",
            _combined(
                lambda obj, kl, A, mask, weight: (
                    weight * kl.sum(-1).mean() - _row_means(obj, mask).mean()
                )
            ),
            "You sum the KL over the tokens of a row, so long rows are punished more. It is "
            "divided by the length, like the objective.",
        ),
        Answer(
            "token mean",
            _combined(
                lambda obj, kl, A, mask, weight: logprobs.masked_mean(weight * kl - obj, mask)
            ),
            "You average over all tokens of the batch at once, so long rows weigh more. Here each "
            "row is averaged first, then the rows.",
        ),
        Answer(
            "padding in the denominator",
            _combined(lambda obj, kl, A, mask, weight: _real(weight * kl - obj, mask).mean()),
            "You divide by the width of the batch, padding included. Divide each row by the "
            "number of its real tokens.",
        ),
        Answer(
            "padding in the sum",
            _combined(
                lambda obj, kl, A, mask, weight: ((weight * kl - obj).sum(-1) / mask.sum(-1)).mean()
            ),
            "You divide by the real tokens, but sum over the padding too: under the mask the ratio "
            "is 1, so every padding position adds an advantage. Mask the sum as well.",
        ),
        Answer(
            "ratio to the reference",
            lambda new, old, ref, adv, mask, clip, weight: grpo_loss(
                new, ref, ref, adv, mask, clip, weight
            ),
            "Your ratio is new over reference. The old policy drew the tokens: the ratio of the "
            "objective is new over old. The reference belongs to the KL.",
        ),
        Answer(
            "old and reference exchanged",
            lambda new, old, ref, adv, mask, clip, weight: grpo_loss(
                new, ref, old, adv, mask, clip, weight
            ),
            "You have exchanged the old policy and the reference. The ratio is new over old, the "
            "KL is measured from the reference.",
        ),
        Answer(
            "new over itself",
            lambda new, old, ref, adv, mask, clip, weight: grpo_loss(
                new, new.detach(), ref, adv, mask, clip, weight
            ),
            "You divide the new policy by itself, so nothing is ever clipped. That is right for "
            "the first update only; use old_log_probs.",
        ),
        Answer(
            "one ratio per row",
            lambda new, old, ref, adv, mask, clip, weight: _row_means(
                weight * _kl(new, ref, mask)
                - _clipped((_real(new, mask) - _real(old, mask)).sum(-1).exp(), adv, clip, clip)[
                    :, None
                ],
                mask,
            ).mean(),
            "You clip one ratio per completion, the product over its tokens. Here every token has "
            "its own.",
        ),
        Answer(
            "no clip",
            _with_objective(lambda ratio, A, clip: ratio * A),
            "Nothing is clipped: take the minimum of ratio * A and clipped ratio * A.",
        ),
        Answer(
            "clamp alone",
            _with_objective(lambda ratio, A, clip: ratio.clamp(1 - clip, 1 + clip) * A),
            "You clamp and take no minimum: a token that has moved the wrong way loses its "
            "gradient and cannot come back.",
        ),
        Answer(
            "maximum",
            _with_objective(
                lambda ratio, A, clip: torch.maximum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
            ),
            "You take the larger of the two objectives. Take the smaller one; the larger is right "
            "only of two losses.",
        ),
        Answer(
            "wrong side for negative advantages",
            _with_objective(lambda ratio, A, clip: ratio.clamp(max=1 + clip) * A),
            "A negative advantage is clipped on the wrong side: at ratio 0.5 you still push down, "
            "and at ratio 1.5 you no longer pull back. The minimum of the two products is right "
            "for both signs.",
        ),
        Answer(
            "advantages along the wrong axis",
            lambda new, old, ref, adv, mask, clip, weight: _row_means(
                weight * _kl(new, ref, mask) - _clipped(_ratio(new, old, mask), adv, clip, clip),
                mask,
            ).mean(),
            "You multiply (N, T) by (N,): torch lays the advantages along the tokens, which fails, "
            "or where N happens to equal T goes wrong without a word: advantages[:, None].",
        ),
        Answer(
            "clip of 0.2",
            lambda new, old, ref, adv, mask, clip, weight: grpo_loss(
                new, old, ref, adv, mask, 0.2, weight
            ),
            "The bounds are written into your function: 0.2. Use the argument clip.",
        ),
        Answer(
            "weight of 0.04",
            lambda new, old, ref, adv, mask, clip, weight: grpo_loss(
                new, old, ref, adv, mask, clip, 0.04
            ),
            "The weight of the KL is written into your function: 0.04, as in the paper. Use the "
            "argument kl_weight.",
        ),
        Answer(
            "mask not used",
            lambda new, old, ref, adv, mask, clip, weight: grpo_loss(
                new, old, ref, adv, torch.ones_like(mask), clip, weight
            ),
            "The mask is not used: what stands after the end of a row is trained like text.",
        ),
        Answer(
            "times the mask",
            lambda new, old, ref, adv, mask, clip, weight: (
                (_unprotected(new, old, ref, adv, clip, weight) * mask).sum(-1) / mask.sum(-1)
            ).mean(),
            "You multiply by the mask, and 0 * NaN is NaN. Choose with torch.where instead, before "
            "the exp.",
        ),
        Answer(
            "masked at the end",
            lambda new, old, ref, adv, mask, clip, weight: _row_means(
                _unprotected(new, old, ref, adv, clip, weight), mask
            ).mean(),
            "You choose with torch.where, but only at the end. The value is right; the gradient "
            "goes back through the exp of the garbage, and 0 * NaN is NaN. Mask both log-ratios, "
            "before the exp.",
        ),
        Answer(
            "detached",
            lambda new, old, ref, adv, mask, clip, weight: grpo_loss(
                new.detach(), old, ref, adv, mask, clip, weight
            ),
            "The number is right, but nothing flows back to log_probs, so the policy learns "
            "nothing.",
        ),
    ),
    cases=(
        Case(
            "beyond the bounds, both signs",
            (
                torch.tensor([[0.2, 0.3, 0.55], [0.4, 0.75, 0.09], [0.63, 0.39, 0.2]]).log(),
                torch.tensor([[0.4, 0.2, 0.50], [0.8, 0.50, 0.10], [0.90, 0.30, 0.2]]).log(),
                torch.tensor([[0.5, 0.3, 0.20], [0.6, 0.30, 0.20], [0.50, 0.60, 0.1]]).log(),
                torch.tensor([1.0, -1.0, 2.0]),
                torch.ones(3, 3),
                0.2,
                0.04,
            ),
        ),
        Case(
            "ragged rows, garbage after the end",
            (
                torch.tensor([[-1.0, -2.0, NAN, -1.0], [-3.0, -INF, INF, NAN], [-1.5, -1, -2, 0]]),
                torch.tensor([[-1.75, -1.5, 0.0, INF], [-3.1, NAN, -1.0, -2.0], [-1.4, -2, -2, 9]]),
                torch.tensor([[-1.5, -1.0, INF, -INF], [-2.0, 0.0, NAN, -1], [-1.75, -1.5, -1, 3]]),
                torch.tensor([1.0, -1.5, 0.5]),
                torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]).bool(),
                0.2,
                0.04,
            ),
        ),
        Case(
            "tighter bounds, more KL, and a row of advantage 0",
            (
                torch.tensor([[0.46, 0.34, 0.3], [0.39, 0.41, 0.5]]).log(),
                torch.tensor([[0.40, 0.40, 0.3], [0.40, 0.40, 0.6]]).log(),
                torch.tensor([[0.20, 0.40, 0.5], [0.10, 0.80, 0.5]]).log(),
                torch.tensor([1.0, 0.0]),
                torch.ones(2, 3, dtype=torch.long),
                0.1,
                0.5,
            ),
        ),
    ),
    hints=(
        "You have both parts: the loss of 4.3, and k3 from notebook 03. With which sign does each "
        "enter a loss?",
        "Two log-ratios, each masked before its exp: log_probs - old_log_probs for the ratio, "
        "ref_log_probs - log_probs for the KL.",
        "Per token: kl_weight * kl - objective. Mask it, sum each row, divide by its number of "
        "real tokens, and take the mean of the rows.",
    ),
    gradient=(0,),
)

EXERCISES = (
    LEAVE_ONE_OUT,
    AVERAGE,
    TOKEN_LOSS,
    CORRECTED_KL,
    ENTROPY_BONUS,
    GRPO_LOSS,
)
