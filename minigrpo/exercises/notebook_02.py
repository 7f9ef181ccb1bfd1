"""The exercises of notebook 02: the probability of a sequence, masks, ratios, perplexity."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minigrpo import logprobs, objective, sampling
from minigrpo.exercises.engine import Answer, Case, Exercise
from minigrpo.exercises.notebook_01 import _own, wave

NAN, INF = math.nan, math.inf


# 2.1 ----------------------------------------------------------------------------------------


def log_product(probs):
    """probs (..., L) -> (...), the logarithm of the product over the last dimension"""
    return probs.log().sum(dim=-1)


LOG_PRODUCT = Exercise(
    key="2.1",
    title="log of a product",
    reference=log_product,
    imports=(),
    package=lambda probs: logprobs.sequence_log_probs(probs.log(), torch.ones_like(probs)),
    others=(
        Answer(
            "running sum",
            lambda probs: probs.log().cumsum(-1)[..., -1],
            "the last entry of a running sum of the logarithms.",
        ),
    ),
    wrong=(
        Answer(
            "logarithm of the product",
            lambda probs: probs.prod(-1).log(),
            "You multiply first and take the logarithm then. The product of many probabilities "
            "underflows to 0 before the logarithm sees it: take the logarithms first, and add.",
        ),
        Answer(
            "higher precision",
            lambda probs: probs.double().prod(-1).log(),
            "You multiply in float64, which only moves the wall: a few hundred factors more and "
            "the product is 0 again. Take the logarithms first, and add.",
        ),
        Answer(
            "product of the logarithms",
            lambda probs: probs.log().prod(-1),
            "You multiply the logarithms. The logarithm of a product is the *sum* of logarithms.",
        ),
        Answer(
            "mean",
            lambda probs: probs.log().mean(-1),
            "That is the mean of the logarithms, the log of the geometric mean: the length is "
            "lost. Sum them.",
        ),
        Answer(
            "base 10",
            lambda probs: probs.log10().sum(-1),
            "That is the logarithm to base 10. The course counts in nats: use .log().",
        ),
        Answer(
            "base 2",
            lambda probs: probs.log2().sum(-1),
            "That is in bits (log2). The course counts in nats: use .log().",
        ),
        Answer(
            "logarithm of the sum",
            lambda probs: probs.sum(-1).log(),
            "You add the probabilities. The probability of this *and* that is a product.",
        ),
    ),
    cases=(
        Case("worked by hand", (torch.tensor([[0.5, 0.25, 0.5], [0.1, 0.2, 0.9]]),)),
        Case("200 factors of 0.1 in float32", (torch.full((1, 200), 0.1),), as_given=True),
        Case("400 factors of 0.1", (torch.full((400,), 0.1),)),
    ),
    hints=(
        "What is the logarithm of a * b?",
        "Take the logarithm of every factor before anything is multiplied.",
        "Then sum over the last dimension.",
    ),
    gradient=(0,),
    lapses=(
        lambda probs: probs.shape[-1] * probs.mean(-1).log(),  # as if all factors were equal
        lambda probs: sum(part.prod(-1).log() for part in probs.split(100, dim=-1)),
    ),
    tolerance=1e-5,
)


# 2.2 ----------------------------------------------------------------------------------------


def token_log_probs(logits, input_ids):
    """logits (N, S, V), input_ids (N, S) -> (N, S - 1), in nats"""
    log_p = logits[:, :-1].log_softmax(dim=-1)  # (N, S - 1, V): position s predicts token s + 1
    return log_p.gather(-1, input_ids[:, 1:, None]).squeeze(-1)


class _Fixed(torch.nn.Module):
    """A policy that answers with given logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, input_ids: Tensor, **_: object) -> _Fixed:
        return self


def _cross_entropy_per_token(logits: Tensor, ids: Tensor) -> Tensor:
    return -F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


COUNT = torch.arange(6)[None]

TOKEN_LOG_PROBS = Exercise(
    key="2.2",
    title="log-prob of every token",
    reference=token_log_probs,
    imports=(),
    package=lambda logits, ids: logprobs.token_log_probs(_Fixed(logits), ids),
    others=(
        Answer(
            "cross-entropy",
            _cross_entropy_per_token,
            "minus F.cross_entropy with reduction='none', the vocabulary in dimension 1.",
        ),
    ),
    wrong=(
        Answer(
            "no shift",
            lambda z, ids: _own(z.log_softmax(-1), ids)[:, 1:],
            "There is no shift: each token is scored with the logits computed after reading it. "
            "The logits at position s predict token s + 1.",
        ),
        Answer(
            "no shift, a column for every token",
            lambda z, ids: _own(z.log_softmax(-1), ids),
            "There is no shift: each token is scored with the logits computed after reading it, "
            "and the first token, which nobody predicts, has a column too.",
        ),
        Answer(
            "shifted the wrong way",
            lambda z, ids: _own(z.log_softmax(-1)[:, 1:], ids[:, :-1]),
            "The shift goes the wrong way: each position is asked for the token before it.",
        ),
        Answer(
            "logits instead of log-probs",
            lambda z, ids: _own(z[:, :-1], ids[:, 1:]),
            "These are logits. They become log-probs by a log_softmax over the vocabulary.",
        ),
        Answer(
            "over the wrong dimension",
            lambda z, ids: _own(z.log_softmax(1)[:, :-1], ids[:, 1:]),
            "The softmax runs over the positions. Each position has a distribution over the "
            "vocabulary, the last dimension.",
        ),
        Answer(
            "logarithm of the softmax",
            lambda z, ids: _own(z.softmax(-1)[:, :-1], ids[:, 1:]).log(),
            "You take the softmax and then its logarithm. A small probability underflows to 0, and "
            "its logarithm is minus infinity: log_softmax does both in one safe step.",
        ),
        Answer(
            "probabilities",
            lambda z, ids: _own(z.softmax(-1)[:, :-1], ids[:, 1:]),
            "These are probabilities. Their logarithms are asked for: log_softmax.",
        ),
        Answer(
            "sign",
            lambda z, ids: -token_log_probs(z, ids),
            "The sign is turned round: these are the losses of the tokens. A log-prob is never "
            "above 0.",
        ),
        Answer(
            "the likeliest token",
            lambda z, ids: z.log_softmax(-1)[:, :-1].amax(-1),
            "You score the likeliest token at each position, not the one that stands in the text.",
        ),
        Answer(
            "softmax after gathering",
            lambda z, ids: z[:, :-1].gather(-1, ids[:, 1:, None]).log_softmax(-1).squeeze(-1),
            "The softmax comes after gather, over a single number, and that is always log 1 = 0. "
            "Normalise over the vocabulary first, then gather.",
        ),
    ),
    cases=(
        Case("the counting model", (40.0 * F.one_hot((COUNT + 1) % 6, 6), COUNT)),
        Case("two rows", (wave(2, 4, 5), torch.tensor([[0, 3, 3, 1], [4, 0, 2, 2]]))),
        Case(
            "a very sure model",
            (
                torch.tensor([[[1000.0, 0.0]] * 3, [[0.0, 900.0]] * 3]),
                torch.tensor([[0, 1, 0]] * 2),
            ),
        ),
    ),
    hints=(
        "Write down for S = 4 which logits predict which token. Which are left over?",
        "logits[:, :-1] and input_ids[:, 1:] belong together; log_softmax over the last dimension.",
        "log_p.gather(-1, targets[..., None]) picks one entry per position and keeps a last "
        "dimension of size 1; .squeeze(-1) removes it (with the -1, or N = 1 vanishes as well).",
    ),
    gradient=(0,),
    lapses=(
        lambda z, ids: z[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(),
        lambda z, ids: token_log_probs(z, ids[:1].expand(len(ids), -1)),  # the first row's text
    ),
)


# 2.3 ----------------------------------------------------------------------------------------


def sequence_log_probs(log_probs, mask):
    """log_probs (N, T), mask (N, T) with 1 = real token -> (N,), in nats"""
    # where() and not a product: 0 * inf would be NaN
    return torch.where(mask.bool(), log_probs, 0.0).sum(dim=-1)


SEQUENCE_LOG_PROBS = Exercise(
    key="2.3",
    title="log-prob of a sequence",
    reference=sequence_log_probs,
    imports=("import torch",),
    package=logprobs.sequence_log_probs,
    others=(
        Answer(
            "masked_fill",
            lambda lp, mask: lp.masked_fill(~mask.bool(), 0.0).sum(-1),
            "log_probs.masked_fill(~mask.bool(), 0.0), then the sum.",
        ),
        Answer(
            "row by row",
            lambda lp, mask: torch.stack(
                [row[m.bool()].sum() for row, m in zip(lp, mask, strict=True)]
            ),
            "pick the real tokens of each row with row[mask].",
        ),
    ),
    wrong=(
        Answer(
            "mask not used",
            lambda lp, mask: lp.sum(-1),
            "The mask is not used: what stands after the end of a row is counted as text.",
        ),
        Answer(
            "mean over the real tokens",
            lambda lp, mask: torch.where(mask.bool(), lp, 0.0).sum(-1) / mask.sum(-1),
            "That is the mean per token. The log-prob of the whole text is the sum.",
        ),
        Answer(
            "mean over all columns",
            lambda lp, mask: torch.where(mask.bool(), lp, 0.0).mean(-1),
            "You divide by the width of the batch, padding included. The log-prob of the text is "
            "the plain sum over its tokens.",
        ),
        Answer(
            "times the mask",
            lambda lp, mask: (lp * mask).sum(-1),
            "You multiply by the mask. That works until something infinite or NaN stands under a "
            "0, because 0 * inf is NaN. Choose with torch.where instead.",
        ),
        Answer(
            "one number for the batch",
            lambda lp, mask: torch.where(mask.bool(), lp, 0.0).sum(),
            "You sum over the rows as well. Each row is a text of its own: sum over dim=-1.",
        ),
        Answer(
            "probability",
            lambda lp, mask: torch.where(mask.bool(), lp, 0.0).sum(-1).exp(),
            "That is the probability, not its logarithm. Long texts make it 0: stay in log space.",
        ),
    ),
    cases=(
        Case(
            "ragged rows",
            (
                torch.tensor([[-1.0, -2.0, -4.0], [-3.0, -5.0, -7.0]]),
                torch.tensor([[1, 1, 0], [1, 1, 1]]),
            ),
        ),
        Case(
            "garbage after the end",
            (
                torch.tensor([[-1.0, -INF, NAN], [-2.0, -0.5, INF]]),
                torch.tensor([[1, 0, 0], [1, 1, 0]]).bool(),  # as `sample` returns it
            ),
        ),
    ),
    hints=(
        "In log space the product over the tokens is a sum. Over which of them?",
        "What stands where the mask is 0 must not be touched at all, not even multiplied by 0.",
        "torch.where(mask.bool(), log_probs, 0.0), then sum over the last dimension.",
    ),
    gradient=(0,),
    lapses=(lambda lp, mask: lp.nan_to_num(0.0, 0.0, 0.0).sum(-1),),
)


# 2.4 ----------------------------------------------------------------------------------------


def sequence_ratio(log_probs, old_log_probs, mask):
    """log_probs, old_log_probs, mask (N, T) -> (N,), new over old"""
    real = mask.bool()
    log_ratio = torch.where(real, log_probs, 0.0) - torch.where(real, old_log_probs, 0.0)
    return log_ratio.sum(dim=-1).exp()


def _real(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0.0)


def _total(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (_real(new, mask) - _real(old, mask)).sum(-1)


SEQUENCE_RATIO = Exercise(
    key="2.4",
    title="ratio of two policies",
    reference=sequence_ratio,
    imports=("import torch",),
    package=lambda new, old, mask: objective.policy_ratio(new, old, mask, level="sequence")[:, 0],
    others=(
        Answer(
            "difference of two sums",
            lambda new, old, mask: (
                logprobs.sequence_log_probs(new, mask) - logprobs.sequence_log_probs(old, mask)
            ).exp(),
            "exp of the difference of the two sequence log-probs.",
        ),
    ),
    wrong=(
        Answer(
            "old over new",
            lambda new, old, mask: (-_total(new, old, mask)).exp(),
            "This is old over new. The ratio says how much likelier the text has become: new over "
            "old, log_probs - old_log_probs in the exponent.",
        ),
        Answer(
            "no exp",
            _total,
            "That is the log-ratio, 0 when nothing has changed. The ratio is its exp.",
        ),
        Answer(
            "mean of the token ratios",
            lambda new, old, mask: (
                _real((_real(new, mask) - _real(old, mask)).exp(), mask).sum(-1) / mask.sum(-1)
            ),
            "You average the ratios of the tokens. The probability of a text is a product, so its "
            "ratio is the product of the token ratios.",
        ),
        Answer(
            "length-normalised",
            lambda new, old, mask: (_total(new, old, mask) / mask.sum(-1)).exp(),
            "You divide by the length: that is the geometric mean of the token ratios, the right "
            "ratio for another method (GSPO, notebook 04). Here the whole product is asked for.",
        ),
        Answer(
            "mask not used",
            lambda new, old, mask: (new - old).sum(-1).exp(),
            "The mask is not used: what stands after the end of a row enters the ratio.",
        ),
        Answer(
            "times the mask",
            lambda new, old, mask: ((new - old) * mask).sum(-1).exp(),
            "You multiply by the mask. That works until something infinite or NaN stands under a "
            "0, because 0 * NaN is NaN. Choose with torch.where instead, before you subtract.",
        ),
        Answer(
            "masked too late",
            lambda new, old, mask: torch.where(mask.bool(), (new - old).exp(), 1.0).prod(-1),
            "The number is right, but its gradient is not: on the way back the 0 of what is not "
            "chosen meets the exp of garbage, and 0 * NaN is NaN. Mask the log-probs before you "
            "subtract.",
        ),
        Answer(
            "quotient of probabilities",
            lambda new, old, mask: _real(new, mask).sum(-1).exp() / _real(old, mask).sum(-1).exp(),
            "You take exp first and divide then. The probability of a long text underflows to 0, "
            "and 0/0 is NaN: subtract in log space, and take exp once, at the end.",
        ),
        Answer(
            "difference of probabilities",
            lambda new, old, mask: _real(new, mask).sum(-1).exp() - _real(old, mask).sum(-1).exp(),
            "You subtract probabilities. A ratio is a quotient, in log space: exp of a difference.",
        ),
        Answer(
            "detached",
            lambda new, old, mask: _total(new, old, mask).exp().detach(),
            "The number is right, but the gradient is cut off, and it is through this ratio that "
            "the policy will learn.",
        ),
        Answer(
            "new over itself",
            lambda new, old, mask: _total(new, new.detach(), mask).exp(),
            "You divide the new policy by itself, which is always 1. The old log-probs are those "
            "recorded when the text was sampled.",
        ),
    ),
    cases=(
        Case(
            "twice and half",
            (
                torch.tensor([[0.4, 0.5, 0.3], [0.2, 0.1, 0.45]]).log(),
                torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.1, 0.9]]).log(),
                torch.ones(2, 3, dtype=torch.long),
            ),
        ),
        Case(
            "ragged rows, garbage after the end",
            (
                torch.tensor([[-1.0, -2.0, NAN], [-3.0, -INF, INF], [-1.0, -2.0, -9.0]]),
                torch.tensor([[-1.5, -1.75, -INF], [-2.5, NAN, 0.0], [-1.25, -2.5, -8.0]]),
                torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0]]).bool(),  # as `sample` returns it
            ),
        ),
        Case(
            "a long text",
            (
                torch.full((1, 200), -6.0),
                torch.full((1, 200), -6.01),
                torch.ones(1, 200, dtype=torch.long),
            ),
        ),
    ),
    hints=(
        "In log space a quotient is a difference. Of which two numbers for each row?",
        "Mask both before you subtract: inf - inf is NaN, and 0 * NaN as well.",
        "Sum the masked differences over dim=-1, then exp, once, at the very end.",
    ),
    gradient=(0,),
    lapses=(lambda new, old, mask: sequence_ratio(new, old, mask).clamp(min=0.6),),
)


# 2.5 ----------------------------------------------------------------------------------------


def _loop(completions: Tensor, eos_id: int) -> Tensor:
    mask = torch.ones_like(completions, dtype=torch.bool)
    for row, ids in enumerate(completions.tolist()):
        if eos_id in ids:
            mask[row, ids.index(eos_id) + 1 :] = False
    return mask


def _up_to_last(completions: Tensor, eos_id: int) -> Tensor:
    is_eos = completions == eos_id
    after_or_at = is_eos.flip(1).cumsum(1).flip(1) > 0
    return after_or_at | ~is_eos.any(1, keepdim=True)


COMPLETION_MASK = Exercise(
    key="2.5",
    title="completion mask",
    reference=sampling.completion_mask,
    imports=(
        "from collections.abc import Sequence",
        "",
        "import torch",
        "from torch import Tensor",
    ),
    package=sampling.completion_mask,
    others=(
        Answer("row by row", _loop, "find the first EOS of each row in a loop."),
        Answer(
            "cumulative product",
            lambda ids, eos: torch.cat(
                [torch.ones_like(ids[:, :1]), (ids[:, :-1] != eos).long().cumprod(1)], dim=1
            ).bool(),
            "a position is real if no token before it was EOS: cumprod of 'not EOS', moved by one.",
        ),
    ),
    wrong=(
        Answer(
            "without the EOS",
            lambda ids, eos: (ids == eos).cumsum(1) == 0,
            "The EOS itself is masked out. It is a token the policy chose: left out of training, "
            "the policy never learns when to stop.",
        ),
        Answer(
            "every token that is not EOS",
            lambda ids, eos: ids != eos,
            "You look at token values: the EOS is masked out, and whatever follows it counts as "
            "text. The mask is about positions, up to and including the first EOS.",
        ),
        Answer(
            "every token that is not padding",
            lambda ids, eos: ids != 0,
            "You look at token values: with a pad token that has the id of the EOS, or with "
            "another pad id, nothing is masked. Find the position of the first EOS instead.",
        ),
        Answer(
            "up to the last EOS",
            _up_to_last,
            "You keep everything up to the *last* EOS. Where the padding is made of EOS tokens "
            "that is the whole row: the text ends at the first one.",
        ),
        Answer(
            "everything",
            lambda ids, eos: torch.ones_like(ids, dtype=torch.bool),
            "Nothing is masked: the padding would be trained like text.",
        ),
        Answer(
            "rows without EOS vanish",
            lambda ids, eos: _loop(ids, eos) & (ids == eos).any(1, keepdim=True),
            "A row without an EOS was cut off at the longest length allowed. All of its tokens "
            "are real, but your mask has none of them.",
        ),
        Answer(
            "argmax in a row without EOS",
            lambda ids, eos: torch.arange(4) <= (ids == eos).long().argmax(1, keepdim=True),
            "In a row without an EOS argmax says 0, as if the first token were one, and your mask "
            "keeps that token alone. Such a row was cut off at the limit: all its tokens are real.",
        ),
        Answer(
            "up to the second EOS",
            lambda ids, eos: (ids == eos).cumsum(1) <= 1,
            "You keep what comes after the first EOS, up to the next one. The count of EOS is 1 "
            "at the first EOS and behind it too: count those *before* a position.",
        ),
    ),
    cases=(
        Case(
            "ragged rows",
            (torch.tensor([[5, 2, 0, 7], [5, 6, 7, 8], [2, 0, 0, 0], [9, 4, 2, 0]]), 2),
        ),
        Case(
            "EOS and padding are both 0",
            (torch.tensor([[5, 0, 0, 0], [5, 6, 7, 8], [0, 0, 0, 0], [0, 5, 0, 5]]), 0),
        ),
    ),
    hints=(
        "For one row on paper: [5, EOS, pad, pad]. Which positions did the policy write?",
        "(completions == eos_id).cumsum(dim=1) counts the EOS so far. Where is it 0, and where 1?",
        "A position is real if no EOS stands *before* it: subtract the position's own EOS from "
        "the count, and compare with 0.",
    ),
    lapses=(
        lambda ids, eos: _loop(ids, 0),
        lambda ids, eos: _loop(ids, eos or -1),  # takes the id 0 for "there is no EOS"
    ),
)


# 2.6 ----------------------------------------------------------------------------------------


def perplexity(log_probs, mask):
    """log_probs (N, T), mask (N, T) with 1 = real token -> scalar, at least 1"""
    total = torch.where(mask.bool(), log_probs, 0.0).sum()
    return (-total / mask.sum()).exp()


def _row_means(log_probs: Tensor, mask: Tensor) -> Tensor:
    return _real(log_probs, mask).sum(-1) / mask.sum(-1)


PERPLEXITY = Exercise(
    key="2.6",
    title="perplexity",
    reference=perplexity,
    imports=("import torch",),
    package=lambda lp, mask: (-logprobs.masked_mean(lp, mask)).exp(),
    others=(
        Answer(
            "pick the real tokens",
            lambda lp, mask: (-lp[mask.bool()].mean()).exp(),
            "log_probs[mask.bool()] is one long list of real tokens; take its mean.",
        ),
    ),
    wrong=(
        Answer(
            "mean of the rows' perplexities",
            lambda lp, mask: (-_row_means(lp, mask)).exp().mean(),
            "You average the perplexities of the rows. It is one number for all tokens: average "
            "the log-probs of all real tokens first, then take exp.",
        ),
        Answer(
            "every row the same weight",
            lambda lp, mask: (-_row_means(lp, mask).mean()).exp(),
            "You average within each row and then over the rows, so the tokens of short rows "
            "count more. Every real token has the same weight here.",
        ),
        Answer(
            "padding counted",
            lambda lp, mask: (-_real(lp, mask).mean()).exp(),
            "You divide by the number of all positions, padding included, which makes every model "
            "look better. Divide by the number of real tokens.",
        ),
        Answer(
            "base 2",
            lambda lp, mask: 2 ** (-logprobs.masked_mean(lp, mask)),
            "You raise 2 to a number in nats. Nats belong to e: use exp.",
        ),
        Answer(
            "sign",
            lambda lp, mask: logprobs.masked_mean(lp, mask).exp(),
            "The sign is missing: this is the geometric mean of the probabilities. Perplexity is "
            "its inverse and at least 1.",
        ),
        Answer(
            "sum instead of mean",
            lambda lp, mask: (-_real(lp, mask).sum()).exp(),
            "You take exp of the sum: that is one over the probability of all the text. Divide by "
            "the number of tokens first.",
        ),
        Answer(
            "root of the product",
            lambda lp, mask: _real(lp, mask).exp().prod() ** (-1 / mask.sum()),
            "You multiply the probabilities and take the root then. On a long text the product "
            "underflows to 0: stay in log space until the very end.",
        ),
        Answer(
            "times the mask",
            lambda lp, mask: (-(lp * mask).sum() / mask.sum()).exp(),
            "You multiply by the mask, and 0 * NaN is NaN. Choose with torch.where instead.",
        ),
    ),
    cases=(
        Case(
            "worked by hand, garbage after the end",
            (torch.tensor([[math.log(0.5), math.log(0.125), NAN]]), torch.tensor([[1, 1, 0]])),
        ),
        Case(
            "ragged rows",
            (
                torch.tensor([[-0.5, -1.5, -0.25, -1.0], [-3.0, -2.0, -7.0, -9.0]]),
                torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool(),  # as `sample` returns it
            ),
        ),
        Case("a long text", (torch.full((2, 200), -3.0), torch.ones(2, 200, dtype=torch.long))),
    ),
    hints=(
        "Which tokens enter the mean, and with which weight?",
        "Sum the log-probs of all real tokens of the batch; divide by how many there are.",
        "Then minus, then exp.",
    ),
    gradient=(0,),
)

EXERCISES = (
    LOG_PRODUCT,
    TOKEN_LOG_PROBS,
    SEQUENCE_LOG_PROBS,
    SEQUENCE_RATIO,
    COMPLETION_MASK,
    PERPLEXITY,
)
