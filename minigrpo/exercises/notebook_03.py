"""The exercises of notebook 03: reward, advantages, clip, KL, and a first GRPO step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minigrpo import logprobs, objective
from minigrpo.exercises.engine import Answer, Case, Exercise

NAN, INF = math.nan, math.inf


# 3.1 ----------------------------------------------------------------------------------------


def letter_share(completions, mask, letter_id):
    """completions (N, T) of ids, mask (N, T) with 1 = real token -> (N,), each from 0 to 1"""
    real = mask.bool()
    hits = (completions == letter_id) & real
    return hits.sum(dim=-1) / real.sum(dim=-1)


def _hits(ids: Tensor, mask: Tensor, letter: int) -> Tensor:
    return (ids == letter) & mask.bool()


LETTER_SHARE = Exercise(
    key="3.1",
    title="share of a letter",
    reference=letter_share,
    imports=(),
    package=lambda ids, mask, letter: logprobs.masked_mean((ids == letter).float(), mask, dim=-1),
    others=(
        Answer(
            "row by row",
            lambda ids, mask, letter: torch.stack(
                [
                    (row[m.bool()] == letter).double().mean()
                    for row, m in zip(ids, mask, strict=True)
                ]
            ),
            "pick the real tokens of each row with row[mask], and take the mean of the hits.",
        ),
    ),
    wrong=(
        Answer(
            "divided by the width",
            lambda ids, mask, letter: _hits(ids, mask, letter).float().mean(-1),
            "You divide by the width of the batch, padding included: a short completion gets less "
            "for the same text. Divide by the number of real tokens of its row.",
        ),
        Answer(
            "padding counted as hits",
            lambda ids, mask, letter: (ids == letter).sum(-1) / mask.sum(-1),
            "You count the letter under the padding as well: the share can pass 1. Count where "
            "the mask is 1.",
        ),
        Answer(
            "mask not used",
            lambda ids, mask, letter: (ids == letter).float().mean(-1),
            "The mask is not used: what stands after the end of a row is rewarded like text.",
        ),
        Answer(
            "ids times the mask",
            lambda ids, mask, letter: (ids * mask == letter).sum(-1) / mask.sum(-1),
            "You multiply the ids by the mask. That turns padding into the id 0, which is a letter "
            "like any other. Combine the hits with the mask, not the ids.",
        ),
        Answer(
            "one number for the batch",
            lambda ids, mask, letter: _hits(ids, mask, letter).sum() / mask.sum(),
            "That is one share for the whole batch. Every completion needs a reward of its own: "
            "sum over dim=-1, above and below the line.",
        ),
        Answer(
            "divided by all tokens of the batch",
            lambda ids, mask, letter: _hits(ids, mask, letter).sum(-1) / mask.sum(),
            "You divide by the tokens of all rows. The reward of a completion must not depend on "
            "its neighbours: divide by the tokens of its own row.",
        ),
        Answer(
            "number of letters",
            lambda ids, mask, letter: _hits(ids, mask, letter).sum(-1),
            "You count the letter. A count grows with the length, so the policy would learn to "
            "write more, not to write that letter: divide by the number of real tokens.",
        ),
        Answer(
            "number of letters, floating point",
            lambda ids, mask, letter: _hits(ids, mask, letter).float().sum(-1),
            "This is how often the letter occurs. Twice the text is worth twice the reward then, "
            "and the policy would learn to write more: divide by the number of real tokens.",
        ),
        Answer(
            "whole division",
            lambda ids, mask, letter: _hits(ids, mask, letter).sum(-1) // mask.sum(-1),
            "// divides and throws the fraction away: every share below 1 becomes 0. Use /.",
        ),
        Answer(
            "whether it occurs",
            lambda ids, mask, letter: _hits(ids, mask, letter).any(-1),
            "You only say whether the letter occurs. How much of it there is is asked for.",
        ),
        Answer(
            "letter to other letters",
            lambda ids, mask, letter: (
                _hits(ids, mask, letter).sum(-1) / ((ids != letter) & mask.bool()).sum(-1)
            ),
            "You divide by the number of *other* tokens, which has no upper end. Divide by all "
            "real tokens of the row.",
        ),
    ),
    cases=(
        Case(
            "ragged rows",
            (
                torch.tensor([[4, 4, 4, 2, 9, 9], [5, 4, 6, 7, 4, 2], [5, 2, 4, 4, 4, 4]]),
                torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]),
                4,
            ),
        ),
        Case(
            "the letter has the id 0",
            (
                torch.tensor([[0, 5, 2, 7, 7], [0, 0, 6, 5, 2]]),
                torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool(),  # as `sample` returns it
                0,
            ),
        ),
    ),
    hints=(
        "For one row on paper: which tokens may be counted, and by what do you divide?",
        "completions == letter_id is true where the letter stands; & combines it with the mask.",
        "Sum the hits over dim=-1, and divide by the sum of the mask over dim=-1.",
    ),
    lapses=(lambda ids, mask, letter: letter_share(ids, mask, 0),),  # one letter for good
)


# 3.2 ----------------------------------------------------------------------------------------


def group_advantages(rewards, group_size):
    """rewards (N,), the first group_size belong to the first prompt, and so on -> (N,)"""
    groups = rewards.view(-1, group_size)  # (P, G)
    centred = groups - groups.mean(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + 1e-4)
    # Rounding may leave a trace of the mean, and dividing by 1e-4 would magnify it.
    equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return torch.where(equal, 0.0, advantages).flatten()


def _grouped(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """From a function (P, G) -> (P, G) to one of rewards and group_size."""
    return lambda rewards, size: function(rewards.view(-1, size)).flatten()


def _zeroed(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """The same, and 0 for a group of equal rewards."""
    return _grouped(lambda g: torch.where((g == g[:, :1]).all(1, keepdim=True), 0.0, function(g)))


def _centred(groups: Tensor) -> Tensor:
    return groups - groups.mean(1, keepdim=True)


def _std(groups: Tensor, correction: int = 1) -> Tensor:
    return groups.std(1, keepdim=True, correction=correction)


def _interleaved(rewards: Tensor, size: int) -> Tensor:
    groups = rewards.view(size, -1).T  # (P, G), but of every P-th row
    return (_centred(groups) / (_std(groups) + 1e-4)).T.flatten()


def _twice(name: str, function: Callable[[Tensor], Tensor], sentence: str) -> tuple[Answer, ...]:
    """One mistake, made by a reader who has thought of equal rewards and by one who has not."""
    return (
        Answer(
            f"{name}, and equal rewards",
            _grouped(function),
            f"{sentence} Look at a group of equal rewards as well.",
        ),
        Answer(name, _zeroed(function), f"Equal rewards are right, the others are not. {sentence}"),
    )


GROUP_ADVANTAGES = Exercise(
    key="3.2",
    title="advantages of a group",
    reference=group_advantages,
    imports=("import torch",),
    package=lambda rewards, size: objective.group_advantages(rewards, size),
    others=(
        Answer(
            "group by group",
            lambda rewards, size: torch.cat(
                [
                    torch.zeros_like(r)
                    if (r == r[0]).all()
                    else (r - r.mean()) / (r.var().sqrt() + 1e-4)
                    for r in rewards.split(size)
                ]
            ),
            "split the rewards into groups, and treat one after the other.",
        ),
    ),
    wrong=(
        Answer(
            "equal rewards not exactly zero",
            _grouped(lambda g: _centred(g) / (_std(g) + 1e-4)),
            "The formula is right. But in float32 the mean of equal rewards is not exactly that "
            "reward, and dividing the rest by 1e-4 makes a signal of a rounding error. Set the "
            "advantages of a group whose rewards are all equal to exactly 0. (Its std, as "
            "computed, need not be 0 either: compare the rewards.)",
        ),
        *_twice(
            "mean and std of the batch",
            lambda g: (g - g.mean()) / (g.std() + 1e-4),
            "You compare with all rewards of the batch. A completion is compared with those that "
            "answered the same prompt; otherwise easy prompts look like good answers.",
        ),
        *_twice(
            "mean of the batch",
            lambda g: (g - g.mean()) / (_std(g) + 1e-4),
            "You subtract the mean of the whole batch, which mixes the prompts: all answers to an "
            "easy prompt then look good. Subtract the mean of the group.",
        ),
        Answer(
            "std of the batch",
            _grouped(lambda g: _centred(g) / (g.std() + 1e-4)),
            "The mean is that of the group, the std that of the whole batch. Here both are those "
            "of the group. (The std of the batch is a variant, which the package has too.)",
        ),
        *_twice(
            "population std",
            lambda g: _centred(g) / (_std(g, correction=0) + 1e-4),
            "Your std divides by G. Here it is the sample std, with G - 1 in the denominator, as "
            "torch's .std() has it unless told otherwise.",
        ),
        Answer(
            "no std",
            _grouped(_centred),
            "You subtract the mean and stop there. That is a variant (Dr. GRPO); here the result "
            "is divided by the std of the group plus 1e-4, so that the unit of the reward drops "
            "out.",
        ),
        *_twice(
            "variance instead of std",
            lambda g: _centred(g) / (g.var(1, keepdim=True) + 1e-4),
            "You divide by the variance. Its square root is meant, the std: otherwise rewards ten "
            "times as large give advantages a tenth as large.",
        ),
        Answer(
            "std plus one",
            _grouped(lambda g: _centred(g) / (_std(g) + 1)),
            "You add 1 to the std. Then the size of the advantages depends on the unit of the "
            "reward; the number added is only there against a division by 0: 1e-4.",
        ),
        *_twice(
            "eps under the root",
            lambda g: _centred(g) / (g.var(1, keepdim=True) + 1e-4).sqrt(),
            "You add 1e-4 to the variance, before the root, where it counts as much as 0.01 does "
            "after it. Add it to the std.",
        ),
        Answer(
            "no eps, and equal rewards",
            _grouped(lambda g: _centred(g) / _std(g)),
            "Nothing is added to the std. It is 0 in a group of equal rewards, and you divide by "
            "it. Add 1e-4, and set the advantages of such a group to 0.",
        ),
        Answer(
            "no eps",
            _zeroed(lambda g: _centred(g) / _std(g)),
            "Nothing, or almost nothing, is added to the std. Add 1e-4: two rewards that differ "
            "by a hair shall not count as much as right and wrong.",
        ),
        Answer(
            "eps of 1e-8",
            _grouped(lambda g: _centred(g) / (_std(g) + 1e-8)),
            "You add 1e-8 to the std, less than the rounding error of float32: equal rewards get "
            "advantages far from 0. Add 1e-4, and set such a group to exactly 0 yourself.",
        ),
        Answer(
            "guard on a small std",
            _grouped(lambda g: torch.where(_std(g) < 1e-5, 0.0, _centred(g) / (_std(g) + 1e-4))),
            "You give 0 to a group whose std is small. Its rewards differ, if only by a hair, and "
            "the 1e-4 sees to it that a hair counts little. Ask whether they are all equal.",
        ),
        Answer(
            "std at least 1e-6",
            _grouped(lambda g: _centred(g) / _std(g).clamp(min=1e-6)),
            "You keep the std above 1e-6, which is hardly more than the rounding error of float32: "
            "equal rewards get advantages far from 0. Add 1e-4, and set such a group to 0.",
        ),
        *_twice(
            "not centred",
            lambda g: g / (_std(g) + 1e-4),
            "The mean of the group is not subtracted: every completion with a positive reward is "
            "pushed up, the worst of the group too.",
        ),
        Answer(
            "groups interleaved",
            _interleaved,
            "You take every P-th reward for a group. The rows come prompt by prompt: the first "
            "group_size belong together, so .view(-1, group_size) has one group per row.",
        ),
        Answer(
            "still a table",
            lambda rewards, size: group_advantages(rewards, size).view(-1, size),
            "The numbers are right, but they still stand in a table (P, G). One for each row of "
            "the batch is asked for, (N,): flatten it.",
        ),
    ),
    cases=(
        Case(
            "three prompts: one easy, one hard, one in between",
            (
                torch.tensor([9.0, 7.0, 8.0, 8.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.25, 0.75, 1.5]),
                4,
            ),
        ),
        # Whatever the order of the sum, in float32 seven times 0.8 over 7 is not 0.8. (And alone
        # in the batch such a group has a std that is not 0.)
        Case("equal rewards, in float32", (torch.full((7,), 0.8), 7), as_given=True),
        Case("rewards that differ by a hair", (torch.tensor([0.0, 1e-6, 0.0, 0.0]), 4)),
    ),
    hints=(
        "Which rewards may a completion be compared with? Bring them into one row each.",
        "groups = rewards.view(-1, group_size); mean and std with dim=1, keepdim=True.",
        "Where groups.amax(dim=1, keepdim=True) equals groups.amin(dim=1, keepdim=True), "
        "torch.where puts 0.0; .flatten() at the end.",
    ),
    # Asks whether the std is 0, which the std of equal numbers need not be.
    lapses=(_grouped(lambda g: torch.where(_std(g) == 0, 0.0, _centred(g) / (_std(g) + 1e-4))),),
)


# 3.3 ----------------------------------------------------------------------------------------


def clipped_objective(ratio, advantages, low, high):
    """ratio (N,), advantages (N,), low and high numbers such as 0.2 -> (N,), to be maximised"""
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def _chosen(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """As if the clipped value were a constant, inside the clip as well."""
    free, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return torch.where(free < clipped, free, clipped.detach())


CLIPPED_OBJECTIVE = Exercise(
    key="3.3",
    title="clipped objective",
    reference=clipped_objective,
    imports=("import torch",),
    package=lambda ratio, adv, low, high: objective.clipped_surrogate(ratio, adv, (low, high)),
    others=(
        Answer(
            "one bound for each sign",
            lambda ratio, adv, low, high: (
                adv * torch.where(adv > 0, ratio.clamp(max=1 + high), ratio.clamp(min=1 - low))
            ),
            "a positive advantage needs the upper bound only, a negative one the lower only.",
        ),
    ),
    wrong=(
        Answer(
            "no clip",
            lambda ratio, adv, low, high: ratio * adv,
            "Nothing is clipped: the further the policy moves, the more it is praised for it.",
        ),
        Answer(
            "clamp alone",
            lambda ratio, adv, low, high: ratio.clamp(1 - low, 1 + high) * adv,
            "You clamp and take no minimum. Where the policy has moved the wrong way (ratio 0.5 "
            "with a positive advantage) the gradient is then 0, and it cannot come back.",
        ),
        Answer(
            "maximum",
            lambda ratio, adv, low, high: torch.maximum(
                ratio * adv, ratio.clamp(1 - low, 1 + high) * adv
            ),
            "You take the larger of the two, the optimistic one: moves the wrong way are no longer "
            "corrected, and moves too far never stop. Take the minimum.",
        ),
        Answer(
            "wrong side for negative advantages",
            lambda ratio, adv, low, high: (
                torch.minimum(ratio, ratio.clamp(1 - low, 1 + high)) * adv
            ),
            "A negative advantage is clipped on the wrong side: at ratio 0.5 you still push down, "
            "and at ratio 1.5 you no longer pull back. Multiply both, the ratio and the clipped "
            "ratio, by the advantage, and take the minimum of the products, whatever the sign.",
        ),
        Answer(
            "upper bound alone",
            lambda ratio, adv, low, high: clipped_objective(ratio, adv, INF, high),
            "There is no lower bound: a bad completion is pushed down without end. Clamp from "
            "below too, at 1 - low.",
        ),
        Answer(
            "lower bound alone",
            lambda ratio, adv, low, high: clipped_objective(ratio, adv, low, INF),
            "There is no upper bound: a good completion is pushed up without end. Clamp from "
            "above too, at 1 + high.",
        ),
        Answer(
            "low and high swapped",
            lambda ratio, adv, low, high: clipped_objective(ratio, adv, high, low),
            "low and high have changed places. The ratio may go down to 1 - low and up to "
            "1 + high.",
        ),
        Answer(
            "low on both sides",
            lambda ratio, adv, low, high: clipped_objective(ratio, adv, low, low),
            "You use low on both sides. The upper bound is 1 + high.",
        ),
        Answer(
            "bounds without the one",
            lambda ratio, adv, low, high: torch.minimum(ratio * adv, ratio.clamp(-low, high) * adv),
            "You clamp between -low and high. A ratio is 1 when nothing has changed, so the "
            "bounds lie around 1: from 1 - low to 1 + high.",
        ),
        Answer(
            "bounds of the logarithm",
            lambda ratio, adv, low, high: torch.minimum(
                ratio * adv, ratio.log().clamp(-low, high).exp() * adv
            ),
            "You clamp the logarithm of the ratio. Its bounds are then exp(-low) and exp(high); "
            "1 - low and 1 + high are asked for.",
        ),
        Answer(
            "product clamped",
            lambda ratio, adv, low, high: torch.minimum(
                ratio * adv, (ratio * adv).clamp(1 - low, 1 + high)
            ),
            "You clamp the product of ratio and advantage. The bounds are those of the ratio: "
            "clamp it alone, and multiply by the advantage then.",
        ),
        Answer(
            "sign of a loss",
            lambda ratio, adv, low, high: -clipped_objective(ratio, adv, low, high),
            "That is minus the objective, a loss. Here the objective is asked for, which is to be "
            "maximised; the minus comes in exercise 3.5.",
        ),
        Answer(
            "mean over the rows",
            lambda ratio, adv, low, high: clipped_objective(ratio, adv, low, high).mean(),
            "You average over the rows already. One number per row is asked for here.",
        ),
        Answer(
            "detached",
            lambda ratio, adv, low, high: clipped_objective(ratio.detach(), adv, low, high),
            "The number is right, but the ratio is cut off from the policy, and nothing is learnt.",
        ),
        Answer(
            "no gradient inside the clip",
            _chosen,
            "The number is right, but inside the bounds, where both values are the same, you "
            "choose one without a gradient. There the ratio must be free to move.",
        ),
        Answer(
            "bounds of 0.2 and 0.4",
            lambda ratio, adv, low, high: clipped_objective(ratio, adv, 0.2, 0.4),
            "The bounds are written into your function. Use the arguments low and high.",
        ),
    ),
    cases=(
        Case(
            "beyond the bounds, both signs",
            (
                torch.tensor([0.5, 0.5, 1.5, 1.5, 0.7, 0.7, 1.7, 1.7]),
                torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, -2.0, 2.0, -2.0]),
                0.2,
                0.4,
            ),
        ),
        Case(
            "within the bounds",
            (torch.tensor([1.0, 1.0, 0.9, 1.1, 1.15]), torch.tensor([1.0, -1.5, -1.0, 0.5, 0.0]))
            + (0.2, 0.4),
        ),
        Case(
            "narrow bounds",
            (
                torch.tensor([0.5, 0.5, 1.5, 1.5]),
                torch.tensor([1.5, -0.5, 0.5, -1.5]),
                0.1,
                0.1,
            ),
        ),
    ),
    hints=(
        "For ratio 1.5 and advantage -1: is the policy where it should be? Should it move?",
        "Write down ratio * advantage and the clipped ratio times the advantage for ratios 0.5 "
        "and 1.5 and both signs. Which of the two is smaller each time?",
        "ratio.clamp(1 - low, 1 + high); torch.minimum of the two products.",
    ),
    gradient=(0,),
)


# 3.4 ----------------------------------------------------------------------------------------


def kl_to_reference(log_probs, ref_log_probs, mask):
    """log_probs, ref_log_probs, mask (N, T) -> (N, T), never below 0, and 0 where masked"""
    log_ratio = torch.where(mask.bool(), ref_log_probs - log_probs, 0.0)  # reference over policy
    return log_ratio.exp() - log_ratio - 1


def _real(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0.0)


def _log_ratio(new: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    return _real(ref, mask) - _real(new, mask)


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - log_ratio - 1


def _kl_div(new: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    return _real(F.kl_div(new, ref, reduction="none", log_target=True), mask)


def _masked_or_not(
    name: str, function: Callable[[Tensor], Tensor], sentence: str
) -> tuple[Answer, ...]:
    """One mistake in a function of ref - new, made before the mask is used and after."""
    return (
        Answer(
            f"{name}, masked at the end",
            lambda new, ref, mask: _real(function(ref - new), mask),
            f"{sentence} And use the mask first, on ref - new: garbage must not reach the exp.",
        ),
        Answer(
            name,
            lambda new, ref, mask: function(_log_ratio(new, ref, mask)),
            f"The mask is right, the formula is not. {sentence}",
        ),
    )


KL_TO_REFERENCE = Exercise(
    key="3.4",
    title="KL to the reference",
    reference=kl_to_reference,
    imports=("import torch",),
    package=lambda new, ref, mask: objective.kl_estimate(_real(new, mask), _real(ref, mask)),
    others=(
        Answer(
            "expm1",
            lambda new, ref, mask: (
                torch.expm1(_log_ratio(new, ref, mask)) - _log_ratio(new, ref, mask)
            ),
            "torch.expm1(x) is exp(x) - 1 without the loss of digits near 0.",
        ),
        Answer(
            "real tokens only",
            lambda new, ref, mask: torch.zeros_like(new).masked_scatter(
                mask.bool(), _k3(ref[mask.bool()] - new[mask.bool()])
            ),
            "compute with log_probs[mask] alone, and put the result in its place among zeros.",
        ),
    ),
    wrong=(
        *_masked_or_not(
            "policy over reference",
            lambda x: (-x).exp() + x - 1,
            "The log-ratio is upside down. The tokens were drawn from the policy, so the "
            "reference goes on top: exp(ref - new) - (ref - new) - 1. The mean of yours is no KL.",
        ),
        Answer(
            "k1",
            lambda new, ref, mask: -_log_ratio(new, ref, mask),
            "That is the plain log-ratio, known as k1. Its mean is right, but it is negative for "
            "many tokens, and as a loss its mean gradient is 0: it pulls the policy nowhere.",
        ),
        Answer(
            "k1 with the wrong sign",
            _log_ratio,
            "That is ref - new alone, whose mean is minus the KL. It is only one of three terms.",
        ),
        *_masked_or_not(
            "k2",
            lambda x: x.square() / 2,
            "Half the square of the log-ratio is known as k2: never negative, but not unbiased. "
            "Here it is exp(ref - new) - (ref - new) - 1.",
        ),
        Answer(
            "absolute value",
            lambda new, ref, mask: _log_ratio(new, ref, mask).abs(),
            "You take the absolute value of the log-ratio. That is a distance, but not the KL. "
            "Add exp(ref - new) - 1 instead, and the sum is never negative.",
        ),
        Answer(
            "absolute value inside",
            lambda new, ref, mask: _k3(_log_ratio(new, ref, mask).abs()),
            "You take the absolute value of the log-ratio first. Its sign matters: the exp grows "
            "where the policy writes a token too rarely, the other term where too often.",
        ),
        *_masked_or_not(
            "minus one forgotten",
            lambda x: x.exp() - x,
            "The - 1 is missing: with two equal policies every token gets 1 instead of 0.",
        ),
        Answer(
            "log-ratio not subtracted",
            lambda new, ref, mask: torch.expm1(_log_ratio(new, ref, mask)),
            "You return exp(ref - new) - 1, which is 0 in the mean whatever the policies are. "
            "Subtract the log-ratio too.",
        ),
        *_masked_or_not(
            "log-ratio added",
            lambda x: x.exp() + x - 1,
            "You add the log-ratio ref - new, and it must be subtracted: only then is the result "
            "never negative.",
        ),
        Answer(
            "times the mask",
            lambda new, ref, mask: _k3(ref - new) * mask,
            "You multiply by the mask. That works until something infinite or NaN stands under a "
            "0, because 0 * inf is NaN. Choose with torch.where instead, before the exp.",
        ),
        Answer(
            "masked at the end",
            lambda new, ref, mask: torch.where(mask.bool(), _k3(ref - new), 0.0),
            "You choose with torch.where, but only at the end. The value is right; the gradient "
            "goes back through the exp of the garbage, and 0 * NaN is NaN. Mask the log-ratio, "
            "before the exp.",
        ),
        Answer(
            "mask not used",
            lambda new, ref, mask: _k3(ref - new),
            "The mask is not used: what stands after the end of a row enters the penalty.",
        ),
        Answer(
            "F.kl_div",
            lambda new, ref, mask: _kl_div(_real(new, mask), _real(ref, mask), mask),
            "F.kl_div expects whole distributions, and weights with the probabilities of the "
            "second: yours is one summand of KL(reference || policy), the other direction. Write "
            "the three terms out.",
        ),
        Answer(
            "F.kl_div, masked at the end",
            _kl_div,
            "F.kl_div is made for whole distributions, and for the other direction; here there is "
            "one drawn token. Write the three terms out, of a log-ratio that is masked already.",
        ),
        Answer(
            "weighted with the probability",
            lambda new, ref, mask: -_real(new, mask).exp() * _log_ratio(new, ref, mask),
            "You multiply the log-ratio by the probability, as in the sum over the vocabulary. "
            "Here the token was drawn with that probability already, which is weight enough.",
        ),
        Answer(
            "probabilities",
            lambda new, ref, mask: _k3(_real(ref, mask).exp() - _real(new, mask).exp()),
            "You subtract probabilities. The logarithm of their quotient is meant: the difference "
            "of the log-probs, as they come.",
        ),
        Answer(
            "clamped",
            lambda new, ref, mask: _k3(_log_ratio(new, ref, mask)).clamp(max=10.0),
            "You cap the result. Above the cap the gradient is 0: a token that the policy has "
            "almost lost is never brought back.",
        ),
        Answer(
            "summed over the tokens",
            lambda new, ref, mask: kl_to_reference(new, ref, mask).sum(-1),
            "You sum over the tokens already. One number per token is asked for.",
        ),
        Answer(
            "mean over the tokens",
            lambda new, ref, mask: logprobs.masked_mean(kl_to_reference(new, ref, mask), mask),
            "You average already. One number per token is asked for, (N, T).",
        ),
        Answer(
            "detached",
            lambda new, ref, mask: kl_to_reference(new, ref, mask).detach(),
            "The number is right, but the gradient is cut off: a penalty that pulls nowhere.",
        ),
    ),
    cases=(
        Case(
            "twice and half",
            (
                torch.tensor([[0.4, 0.25, 0.3], [0.1, 0.6, 0.5]]).log(),
                torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.5, 0.9]]).log(),
                torch.tensor([[1, 1, 1], [1, 1, 0]]),
            ),
        ),
        Case(
            "the same policy, garbage after the end",
            (
                torch.tensor([[-1.0, -2.0, NAN, -1.0], [-3.0, -INF, -1.0, INF]]),
                torch.tensor([[-1.0, -2.0, -0.5, INF], [-3.0, NAN, -INF, -1.0]]),
                torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]).bool(),  # as `sample` returns it
            ),
        ),
        Case(
            "the policy has almost lost a token",
            (torch.tensor([[-8.0, -6.0]]), torch.tensor([[-0.5, -1.0]]), torch.ones(1, 2)),
        ),
    ),
    hints=(
        "What must come out for a token that both policies find equally likely?",
        "With x = ref_log_probs - log_probs, the three terms are exp(x), -x and -1.",
        "x = torch.where(mask.bool(), ref_log_probs - log_probs, 0.0): masked before the exp, "
        "nothing under the mask can reach the value or the gradient.",
    ),
    gradient=(0,),
)


# 3.5 ----------------------------------------------------------------------------------------


def sequence_grpo_loss(log_probs, old_log_probs, advantages, mask, clip):
    """log_probs, old_log_probs, mask (N, T), advantages (N,), clip a number -> scalar ()"""
    log_ratio = torch.where(mask.bool(), log_probs - old_log_probs, 0.0)  # new over old
    ratio = log_ratio.sum(dim=-1).exp()  # (N,), one per row
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def _total(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (_real(new, mask) - _real(old, mask)).sum(-1)


def _loss(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    return -clipped_objective(ratio, advantages, clip, clip).mean()


def _underflowing(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return _real(new, mask).sum(-1).exp() / _real(old, mask).sum(-1).exp()


SEQUENCE_GRPO_LOSS = Exercise(
    key="3.5",
    title="loss of sequence GRPO",
    reference=sequence_grpo_loss,
    imports=("import torch",),
    package=lambda new, old, adv, mask, clip: objective.grpo_loss(
        new, old, adv, mask, level="sequence", how="sequence_mean", clip=(clip, clip)
    )[0],
    others=(
        Answer(
            "larger of two losses",
            lambda new, old, adv, mask, clip: torch.maximum(
                -adv * _total(new, old, mask).exp(),
                -adv * _total(new, old, mask).exp().clamp(1 - clip, 1 + clip),
            ).mean(),
            "the minus first: the minimum of two objectives is the maximum of two losses.",
        ),
    ),
    wrong=(
        Answer(
            "every ratio with every advantage",
            lambda new, old, adv, mask, clip: _loss(
                _total(new, old, mask).exp()[:, None], adv, clip
            ),
            "Your ratio has the shape (N, 1) and the advantages have (N,), so their product is a "
            "table (N, N), every ratio with every advantage. Sum over dim=-1 without keepdim.",
        ),
        Answer(
            "objective instead of loss",
            lambda new, old, adv, mask, clip: -_loss(_total(new, old, mask).exp(), adv, clip),
            "The minus is missing: this is the objective. An optimiser minimises, so it would make "
            "the bad completions likelier.",
        ),
        Answer(
            "sum over the rows",
            lambda new, old, adv, mask, clip: (
                _loss(_total(new, old, mask).exp(), adv, clip) * len(new)
            ),
            "You sum over the rows: a batch twice as large would take steps twice as long. Take "
            "the mean.",
        ),
        Answer(
            "one number per row",
            lambda new, old, adv, mask, clip: (
                -clipped_objective(_total(new, old, mask).exp(), adv, clip, clip)
            ),
            "You return a loss for every row. One number is asked for: their mean.",
        ),
        Answer(
            "old over new",
            lambda new, old, adv, mask, clip: _loss((-_total(new, old, mask)).exp(), adv, clip),
            "This ratio is old over new: making a good completion likelier makes it smaller. It is "
            "new over old, log_probs - old_log_probs in the exponent.",
        ),
        Answer(
            "log-ratio instead of ratio",
            lambda new, old, adv, mask, clip: _loss(_total(new, old, mask), adv, clip),
            "The exp is missing: you clip the log-ratio, which is 0, not 1, when nothing has "
            "changed.",
        ),
        Answer(
            "mean of the token ratios",
            lambda new, old, adv, mask, clip: _loss(
                logprobs.masked_mean((_real(new, mask) - _real(old, mask)).exp(), mask, dim=-1),
                adv,
                clip,
            ),
            "You average the ratios of the tokens. The ratio of a text is their product: sum the "
            "log-ratios, then exp.",
        ),
        Answer(
            "one ratio per token",
            lambda new, old, adv, mask, clip: objective.grpo_loss(
                new, old, adv, mask, level="token", clip=(clip, clip)
            )[0],
            "You clip a ratio for every token and average then. That is the objective of notebook "
            "04. Here a completion has one ratio: sum the log-ratios of its tokens, then exp.",
        ),
        Answer(
            "length-normalised ratio",
            lambda new, old, adv, mask, clip: _loss(
                (_total(new, old, mask) / mask.sum(-1)).exp(), adv, clip
            ),
            "You divide the log-ratio by the length: the geometric mean of the token ratios, the "
            "right one for GSPO (notebook 04). Here the ratio is the whole product.",
        ),
        Answer(
            "divided by the length",
            lambda new, old, adv, mask, clip: (
                -(
                    clipped_objective(_total(new, old, mask).exp(), adv, clip, clip) / mask.sum(-1)
                ).mean()
            ),
            "You divide the objective of each row by its length, so long completions teach less. "
            "With one ratio per completion there is nothing to average over its tokens.",
        ),
        Answer(
            "mask not used",
            lambda new, old, adv, mask, clip: _loss((new - old).sum(-1).exp(), adv, clip),
            "The mask is not used: what stands after the end of a row enters its ratio.",
        ),
        Answer(
            "times the mask",
            lambda new, old, adv, mask, clip: _loss(((new - old) * mask).sum(-1).exp(), adv, clip),
            "You multiply by the mask, and 0 * NaN is NaN. Choose with torch.where instead.",
        ),
        Answer(
            "no clip",
            lambda new, old, adv, mask, clip: -(_total(new, old, mask).exp() * adv).mean(),
            "Nothing is clipped: take the minimum of ratio * advantage and clipped ratio * "
            "advantage.",
        ),
        Answer(
            "clamp alone",
            lambda new, old, adv, mask, clip: (
                -(_total(new, old, mask).exp().clamp(1 - clip, 1 + clip) * adv).mean()
            ),
            "You clamp and take no minimum: a completion that has moved the wrong way loses its "
            "gradient and cannot come back.",
        ),
        Answer(
            "wrong side for negative advantages",
            lambda new, old, adv, mask, clip: (
                -(_total(new, old, mask).exp().clamp(max=1 + clip) * adv).mean()
            ),
            "A negative advantage is clipped on the wrong side: at ratio 0.5 you still push down, "
            "and at ratio 1.5 you no longer pull back. Multiply by the advantage first; the "
            "minimum of the two products comes then.",
        ),
        Answer(
            "detached",
            lambda new, old, adv, mask, clip: _loss(
                _total(new.detach(), old, mask).exp(), adv, clip
            ),
            "The number is right, but the ratio is cut off from the policy, and it is only "
            "through the ratio that the policy learns.",
        ),
        Answer(
            "old log-probs not used",
            lambda new, old, adv, mask, clip: _loss(
                _total(new, new.detach(), mask).exp(), adv, clip
            ),
            "You divide the new policy by itself, so the ratio is always 1 and nothing is ever "
            "clipped. That is right for the first update only; use old_log_probs.",
        ),
        Answer(
            "log-probs instead of a ratio",
            lambda new, old, adv, mask, clip: -(_real(new, mask).sum(-1) * adv).mean(),
            "There is no ratio: you weight the log-probs with the advantages (REINFORCE). At the "
            "first update that has the same gradient, but later nothing corrects for the old "
            "policy, and nothing is clipped.",
        ),
        Answer(
            "quotient of probabilities",
            lambda new, old, adv, mask, clip: _loss(_underflowing(new, old, mask), adv, clip),
            "You take exp first and divide then. The probability of a long text underflows to 0, "
            "and 0/0 is NaN: subtract in log space.",
        ),
        Answer(
            "clip of 0.2",
            lambda new, old, adv, mask, clip: _loss(_total(new, old, mask).exp(), adv, 0.2),
            "The clip of 0.2 is written into your function. Use the argument.",
        ),
    ),
    cases=(
        Case(
            "ratios 0.5 and 1.5, both signs",
            (
                torch.tensor([[0.3, 0.3, 0.7]] * 2 + [[0.6, 0.45, 0.5]] * 2).log(),
                torch.tensor([[0.4, 0.45, 0.5]] * 2 + [[0.45, 0.4, 0.5]] * 2).log(),
                torch.tensor([1.0, -0.5, 1.5, -2.0]),
                torch.tensor([[1, 1, 0]] * 2 + [[1, 1, 1]] * 2),
                0.2,
            ),
        ),
        Case(
            "ragged rows, garbage after the end",
            (
                torch.tensor([[-1.0, -2.0, NAN], [-3.0, -INF, INF], [-1.0, -1.5, -0.5]]),
                torch.tensor([[-1.5, -1.75, -INF], [-2.75, NAN, 0.0], [-0.75, -1.5, -0.75]]),
                torch.tensor([2.0, -0.5, -1.0]),
                torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool(),  # as `sample` returns it
                0.3,
            ),
        ),
        Case(
            "the first update, on a long text",
            (
                torch.full((2, 200), -6.0),
                torch.full((2, 200), -6.0),
                torch.tensor([1.0, -1.0]),
                torch.ones(2, 200, dtype=torch.long),
                0.2,
            ),
        ),
    ),
    hints=(
        "What is the ratio of a whole completion, if you have the log-probs of its tokens?",
        "torch.where(mask.bool(), log_probs - old_log_probs, 0.0), summed over dim=-1, then exp; "
        "the rest is exercise 3.3, with clip on both sides.",
        "Minus the mean over the rows: an optimiser minimises, and the objective is to grow.",
    ),
    gradient=(0,),
)


# 3.6 ----------------------------------------------------------------------------------------


def grpo_step(logits, tokens, rewards, lr):
    """logits (V,), tokens (G,) drawn from them, rewards (G,), lr -> (V,), without gradient"""
    policy = logits.detach().clone().requires_grad_()
    if rewards.max() == rewards.min():
        return policy.detach()  # equal rewards: nothing to learn
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    loss = -(advantages * policy.log_softmax(dim=-1)[tokens]).mean()
    (gradient,) = torch.autograd.grad(loss, policy)
    return policy.detach() - lr * gradient


def _advantages(rewards: Tensor) -> Tensor:
    return group_advantages(rewards, len(rewards))


def _step(logits: Tensor, tokens: Tensor, advantages: Tensor, lr: float) -> Tensor:
    """logits + lr * mean of A_i (one-hot of token i - softmax), the gradient by hand."""
    one_hot = F.one_hot(tokens, len(logits)).to(logits.dtype)  # (G, V)
    return logits + lr * (advantages[:, None] * (one_hot - logits.softmax(-1))).mean(0)


def _change(logits: Tensor, tokens: Tensor, rewards: Tensor) -> Tensor:
    """The step for a learning rate of 1, alone."""
    return _step(torch.zeros_like(logits), tokens, _advantages(rewards), 1.0)


def _from_ratio(logits: Tensor, tokens: Tensor, rewards: Tensor, lr: float) -> Tensor:
    policy = logits.detach().clone().requires_grad_()
    log_probs = policy.log_softmax(-1)[tokens]
    loss = -((log_probs - log_probs.detach()).exp() * _advantages(rewards)).mean()
    loss.backward()
    return logits - lr * policy.grad


def _from_package(logits: Tensor, tokens: Tensor, rewards: Tensor, lr: float) -> Tensor:
    policy = logits.detach().clone().requires_grad_()
    log_probs = logprobs.next_token_log_probs(policy)[tokens][:, None]  # (G, 1)
    advantages = objective.group_advantages(rewards, len(rewards))
    loss, _ = objective.grpo_loss(log_probs, None, advantages, torch.ones_like(log_probs))
    loss.backward()
    return logits - lr * policy.grad


def _likelier(logits: Tensor, tokens: Tensor, rewards: Tensor, lr: float) -> Tensor:
    """With the gradient of the probabilities."""
    weights = _advantages(rewards) * logits.softmax(-1)[tokens]
    return _step(logits, tokens, weights, lr)


def _last_only(logits: Tensor, tokens: Tensor, rewards: Tensor, lr: float) -> Tensor:
    """What logits[tokens] += ... does: of a token that was drawn twice the last one counts."""
    new = logits.clone()
    for token, advantage in zip(tokens.tolist(), _advantages(rewards)):
        new[token] = logits[token] + lr * advantage / len(tokens)
    return new


def _as_adam(logits: Tensor, tokens: Tensor, rewards: Tensor, lr: float) -> Tensor:
    change = _change(logits, tokens, rewards)
    return logits + lr * change / (change.abs() + 1e-8)


GRPO_STEP = Exercise(
    key="3.6",
    title="one GRPO step",
    reference=grpo_step,
    imports=("import torch",),
    package=_from_package,
    others=(
        Answer(
            "through the ratio",
            _from_ratio,
            "the ratio exp(log_p - log_p.detach()) is 1, and has the gradient of log_p.",
        ),
        Answer(
            "gradient by hand",
            lambda logits, tokens, rewards, lr: _step(logits, tokens, _advantages(rewards), lr),
            "the gradient of log pi(token) in the logits is its one-hot vector minus the softmax.",
        ),
        Answer(
            "one-hot vectors alone",
            lambda logits, tokens, rewards, lr: logits.index_add(
                0, tokens, lr * _advantages(rewards).to(logits.dtype) / len(tokens)
            ),
            "the advantages of a group sum to 0, so the softmax, the same for all, drops out.",
        ),
    ),
    wrong=(
        Answer(
            "uphill on the loss",
            lambda logits, tokens, rewards, lr: _step(logits, tokens, -_advantages(rewards), lr),
            "You step the wrong way: the good tokens become rarer. Descend on the loss, logits - "
            "lr * gradient, and mind the minus in the loss itself.",
        ),
        Answer(
            "rewards instead of advantages",
            lambda logits, tokens, rewards, lr: _step(logits, tokens, rewards, lr),
            "You weight with the raw rewards. Add 10 to all of them, and the step is another one, "
            "though no token is better than before: use advantages.",
        ),
        Answer(
            "no std",
            lambda logits, tokens, rewards, lr: _step(logits, tokens, rewards - rewards.mean(), lr),
            "You subtract the mean, but do not divide by the std (plus 1e-4) of the rewards.",
        ),
        Answer(
            "not centred",
            lambda logits, tokens, rewards, lr: _step(
                logits, tokens, rewards / (rewards.std() + 1e-4), lr
            ),
            "You divide by the std, but the mean of the rewards is not subtracted.",
        ),
        Answer(
            "population std",
            lambda logits, tokens, rewards, lr: _step(
                logits,
                tokens,
                (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
                if rewards.max() > rewards.min()
                else torch.zeros_like(rewards),
                lr,
            ),
            "Your std divides by G. It is the sample std here, with G - 1, as in exercise 3.2.",
        ),
        Answer(
            "equal rewards not exactly zero",
            lambda logits, tokens, rewards, lr: _step(
                logits, tokens, (rewards - rewards.mean()) / (rewards.std() + 1e-4), lr
            ),
            "Almost: equal rewards still move the logits, because in float32 their mean is not "
            "exactly what each of them is. Their advantages must be exactly 0, as in exercise 3.2.",
        ),
        Answer(
            "sum over the group",
            lambda logits, tokens, rewards, lr: _step(
                logits, tokens, len(tokens) * _advantages(rewards), lr
            ),
            "You sum over the group instead of taking the mean: the step grows with G.",
        ),
        Answer(
            "gradient of the probabilities",
            _likelier,
            "You differentiate the probabilities. A token that was drawn often then counts twice, "
            "for its number and for its probability: differentiate their logarithms.",
        ),
        Answer(
            "the last of each token",
            _last_only,
            "A token that was drawn more than once is counted once: logits[tokens] += ... writes "
            "to the same place several times, and the last one stays. Let autograd add them up, or "
            "use index_add.",
        ),
        Answer(
            "nothing moves",
            lambda logits, tokens, rewards, lr: logits.clone(),
            "The logits come back as they were. Is the gradient 0, because the ratio was detached "
            "as a whole? In exp(log_p - log_p.detach()) the first log_p must stay attached.",
        ),
        Answer(
            "probabilities",
            lambda logits, tokens, rewards, lr: grpo_step(logits, tokens, rewards, lr).softmax(-1),
            "These are the new probabilities. The new logits are asked for.",
        ),
        Answer(
            "log-probs",
            lambda logits, tokens, rewards, lr: grpo_step(logits, tokens, rewards, lr).log_softmax(
                -1
            ),
            "These are the new log-probs, the logits up to a constant. The step itself is asked "
            "for: logits - lr * gradient.",
        ),
        Answer(
            "the change alone",
            lambda logits, tokens, rewards, lr: lr * _change(logits, tokens, rewards),
            "That is the change. Add it to the logits.",
        ),
        Answer(
            "the gradient",
            lambda logits, tokens, rewards, lr: -_change(logits, tokens, rewards),
            "That is the gradient of the loss. The logits after the step are asked for.",
        ),
        Answer(
            "a step of Adam",
            _as_adam,
            "Every logit moves by lr, whatever its gradient: that is a step of Adam, or of the "
            "sign. A plain step of gradient descent is asked for.",
        ),
    ),
    cases=(
        Case(
            "six draws, some of them twice",
            (
                torch.tensor([1.0, 0.0, -0.5, 0.5, 2.0]),
                torch.tensor([0, 4, 4, 1, 3, 0]),
                torch.tensor([1.0, 0.25, 0.0, 0.5, 0.25, 0.75]),
                0.5,
            ),
        ),
        Case(
            "one hit among eight",
            (
                torch.zeros(4),
                torch.tensor([2, 0, 1, 1, 3, 0, 3, 0]),
                torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
                2.0,
            ),
        ),
        Case(
            "equal rewards, in float32",
            (
                torch.tensor([0.5, -0.5, 0.0, 1.0]),
                torch.tensor([3, 0, 3, 1, 3, 0, 2]),
                torch.tensor([0.8] * 7),
                1.0,
            ),
            as_given=True,
        ),
    ),
    hints=(
        "Which of the tokens should become likelier, and what are they compared with?",
        "policy = logits.detach().clone().requires_grad_() is a copy to differentiate in; "
        "policy.log_softmax(dim=-1)[tokens] are the log-probs of the draws.",
        "The loss is minus the mean of advantage times log-prob; torch.autograd.grad(loss, "
        "policy) returns a tuple with its gradient; subtract lr times that from the logits.",
    ),
    lapses=(
        lambda logits, tokens, rewards, lr: grpo_step(logits, tokens, rewards, 0.5),
        # Only the best counts, and the others are all the same.
        lambda logits, tokens, rewards, lr: _step(
            logits, tokens, _advantages((rewards == rewards.max()).to(rewards.dtype)), lr
        ),
    ),
)

EXERCISES = (
    LETTER_SHARE,
    GROUP_ADVANTAGES,
    CLIPPED_OBJECTIVE,
    KL_TO_REFERENCE,
    SEQUENCE_GRPO_LOSS,
    GRPO_STEP,
)
