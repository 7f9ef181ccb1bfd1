"""The exercises of notebook 01: what a text is worth, attention, the loss, the temperature."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minigrpo import corpus, gpt, logprobs, pretrain
from minigrpo.exercises.engine import Answer, Case, Exercise


def wave(*shape: int) -> Tensor:
    """Numbers without a pattern, between -2 and 2, the same on every machine."""
    return (2 * torch.sin(torch.arange(1, math.prod(shape) + 1) ** 2 * 0.7)).view(shape)


# 1.1 ----------------------------------------------------------------------------------------


def _entropy(counts: Tensor) -> float:
    p = counts[counts > 0].double() / counts.sum()
    return float(-(p * p.log()).sum())


def _pairs(ids: Tensor) -> Tensor:
    """How often b follows a, as a table with a row per a."""
    size = int(ids.max()) + 1
    return torch.bincount(ids[:-1] * size + ids[1:], minlength=size**2).view(size, size)


def _by_rows(ids: Tensor) -> float:
    pairs = _pairs(ids)
    shares = pairs.sum(1) / pairs.sum()
    return sum(float(s) * _entropy(row) for s, row in zip(shares, pairs, strict=True) if s > 0)


def _rows_alike(ids: Tensor) -> float:
    rows = [_entropy(row) for row in _pairs(ids) if row.sum() > 0]
    return sum(rows) / len(rows)


def _smoothed(ids: Tensor) -> float:
    pairs = _pairs(ids) + 1
    return _entropy(pairs.flatten()) - _entropy(pairs.sum(1))


def _no_gaps(ids: Tensor) -> float:
    size = len(ids.unique())  # takes for granted that the ids are 0, 1, 2, ...
    pairs = torch.bincount(ids[:-1] * size + ids[1:], minlength=size**2)[: size**2]
    return _entropy(pairs) - _entropy(pairs.view(size, size).sum(1))


def _commonest_row(ids: Tensor) -> float:
    pairs = _pairs(ids)
    row = pairs[pairs.sum(1).argmax()]
    return _entropy(row) * float(row.sum() / pairs.sum())


BIGRAM_ENTROPY = Exercise(
    key="1.1",
    title="bigram entropy",
    reference=corpus.bigram_entropy,
    imports=("import torch", "from torch import Tensor"),
    package=corpus.bigram_entropy,
    others=(
        Answer("row by row", _by_rows, "the entropy of each row of pair counts, weighted."),
        Answer(
            "difference",
            lambda ids: _entropy(_pairs(ids).flatten()) - _entropy(_pairs(ids).sum(1)),
            "entropy of the pairs minus entropy of their first characters.",
        ),
    ),
    wrong=(
        Answer(
            "joint entropy",
            lambda ids: _entropy(_pairs(ids).flatten()),
            "That is the entropy of the pairs, H(a, b). What the first character costs has to go: "
            "you want the second one given the first, so the logarithm of p(b|a), not of p(a, b).",
        ),
        Answer(
            "bits",
            lambda ids: corpus.bigram_entropy(ids) / math.log(2),
            "That is in bits (log2). The course counts in nats: use the natural logarithm.",
        ),
        Answer(
            "rows count alike",
            _rows_alike,
            "You average the entropies of what follows each character as if all were equally "
            "common. Weight each by how often its first character occurs.",
        ),
        Answer(
            "unigram entropy",
            lambda ids: _entropy(torch.bincount(ids)),
            "That is the entropy of single characters: the one before is not used at all.",
        ),
        Answer(
            "add-one smoothing",
            _smoothed,
            "You add 1 to every count. Smoothing is for predicting new text; here the text itself "
            "is measured, so count what is there.",
        ),
        Answer(
            "backwards",
            lambda ids: corpus.bigram_entropy(ids.flip(0)),
            "You predict the character before from the one after. Turn p(a|b) into p(b|a).",
        ),
    ),
    cases=(
        Case("aaab, with a gap in the ids", (torch.tensor([0, 0, 0, 5]),)),
        Case("three letters", (torch.tensor([0, 1, 0, 2, 0, 1, 1, 2, 1]),)),
    ),
    hints=(
        "Count the pairs (ids[:-1], ids[1:]) in a square table: one row per first character.",
        "a * V + b numbers the pairs, so torch.bincount(ids[:-1] * V + ids[1:], minlength=V * V) "
        "counts all of them at once; .view(V, V) makes the table.",
        "H(b | a) = H(a, b) - H(a): the entropy of the whole table minus the entropy of its row "
        "sums. Leave out the zeros, or use torch.special.entr(p), which is -p ln p with 0 at 0.",
    ),
    number=True,
    lapses=(_no_gaps, _commonest_row),
)


# 1.2 ----------------------------------------------------------------------------------------

CAUSAL_MASK = Exercise(
    key="1.2",
    title="causal mask",
    reference=gpt.causal_mask,
    imports=("import torch", "from torch import Tensor"),
    package=gpt.causal_mask,
    others=(
        Answer(
            "compare positions",
            lambda length: torch.arange(length)[:, None] >= torch.arange(length),
            "compare the positions themselves: row i may read column j where i >= j.",
        ),
    ),
    wrong=(
        Answer(
            "the future",
            lambda length: torch.ones(length, length, dtype=torch.bool).triu(),
            "This is the other triangle: every position may read the future and not the past.",
        ),
        Answer(
            "not itself",
            lambda length: torch.ones(length, length, dtype=torch.bool).tril(-1),
            "A position may read itself too: the diagonal belongs to it. As it stands the first "
            "position has nothing to read, and its softmax would be 0/0.",
        ),
        Answer(
            "no mask",
            lambda length: torch.ones(length, length, dtype=torch.bool),
            "Everything may read everything: the model would see the token it has to predict.",
        ),
        Answer(
            "what to hide",
            lambda length: torch.ones(length, length, dtype=torch.bool).triu(1),
            "You mark what is hidden. The convention here is the opposite: True = may read.",
        ),
        Answer(
            "0 and minus infinity",
            lambda length: torch.full((length, length), -torch.inf).triu(1),
            "That is the right mask in the other convention, as numbers to add to the scores. Here "
            "it is a bool tensor, True = may read.",
        ),
        Answer(
            "ones and zeros",
            lambda length: torch.ones(length, length).tril(),
            "Right triangle, wrong type: 1.0 and 0.0 are numbers. Ask for dtype=torch.bool.",
        ),
    ),
    cases=(Case("length 1", (1,)), Case("length 4", (4,))),
    hints=(
        "Write the rows for length 3 on paper. What shape do the True values have?",
        "torch.tril keeps the lower triangle of a matrix, with the diagonal.",
        "Start from torch.ones(length, length, dtype=torch.bool).",
    ),
    lapses=(lambda length: gpt.causal_mask(length).squeeze(),),
)


# 1.3 ----------------------------------------------------------------------------------------


def attention(query, key, value, mask):
    """query, key, value (N, heads, S, d), mask bool (S, S) -> (N, heads, S, d)"""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # (N, heads, S, S)
    scores = scores.masked_fill(~mask, -torch.inf)  # never chosen
    return scores.softmax(dim=-1) @ value


def _attention(query, key, value, mask, scale=0.5, dim=-1, hidden=-torch.inf, after=False):
    """Attention with one thing done differently."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** scale
    if after:
        return (scores.softmax(dim=dim) * mask) @ value
    return scores.masked_fill(~mask, hidden).softmax(dim=dim) @ value


ATTENTION = Exercise(
    key="1.3",
    title="attention",
    reference=attention,
    imports=("import torch",),
    package=F.scaled_dot_product_attention,
    others=(
        Answer(
            "PyTorch's own",
            F.scaled_dot_product_attention,
            "F.scaled_dot_product_attention(query, key, value, attn_mask=mask).",
        ),
    ),
    wrong=(
        Answer(
            "not scaled",
            lambda q, k, v, m: _attention(q, k, v, m, scale=0),
            "The scores are not divided by the root of d: with many columns they grow large and "
            "the softmax picks a single position.",
        ),
        Answer(
            "divided by d",
            lambda q, k, v, m: _attention(q, k, v, m, scale=1),
            "You divide by d. A sum of d products of unit size has a spread of the *root* of d.",
        ),
        Answer(
            "softmax over the readers",
            lambda q, k, v, m: _attention(q, k, v, m, dim=-2, hidden=-1e9),
            "The softmax runs over the wrong dimension. For each position that reads (row), the "
            "shares over what is read (columns) sum to 1: dim=-1.",
        ),
        Answer(
            "mask after the softmax",
            lambda q, k, v, m: _attention(q, k, v, m, after=True),
            "You mask after the softmax: the future has already taken its share, and the rest no "
            "longer sums to 1. Mask the scores, with minus infinity.",
        ),
        Answer(
            "masked with 0",
            lambda q, k, v, m: _attention(q, k, v, m, hidden=0.0),
            "A score of 0 is not 'never': e^0 = 1 is a share like others. Use minus infinity.",
        ),
        Answer(
            "no mask",
            lambda q, k, v, m: _attention(q, k, v, torch.ones_like(m)),
            "The mask is not used, so every position reads the future.",
        ),
        Answer(
            "mask upside down",
            lambda q, k, v, m: _attention(q, k, v, ~m),
            "You hide what may be read. True means: may be read, so the minus infinity goes where "
            "the mask is False.",
        ),
        Answer(
            "a causal mask of its own",
            lambda q, k, v, m: _attention(q, k, v, gpt.causal_mask(len(m))),
            "You build a causal mask instead of using the one you are given. With padding, or a "
            "window, the mask is another.",
        ),
    ),
    cases=(
        Case(
            "equal scores",
            (
                torch.zeros(1, 1, 3, 1),
                torch.zeros(1, 1, 3, 1),
                torch.tensor([1.0, 3.0, 5.0]).view(1, 1, 3, 1),
                gpt.causal_mask(3),
            ),
        ),
        Case(
            "two texts, three heads",
            (*wave(3, 2, 3, 5, 4).unbind(0), gpt.causal_mask(5)),
        ),
        Case(
            "a mask that is not causal",
            (
                *wave(3, 2, 2, 3, 3).unbind(0),
                torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]]).bool(),
            ),
        ),
    ),
    hints=(
        "Three steps: scores of every query with every key, shares, sum of the values.",
        "query @ key.transpose(-2, -1) gives all scores at once, shape (N, heads, S, S). Divide "
        "by the root of the last dimension of query.",
        "scores.masked_fill(~mask, -torch.inf) before softmax(dim=-1); then @ value.",
    ),
    gradient=(0, 1, 2),
    lapses=(
        lambda q, k, v, m: attention(q, k, v, m).squeeze(),
        lambda q, k, v, m: attention(q, k * (q.shape[-1] / q.shape[-2]) ** 0.5, v, m),  # root of S
    ),
)


# 1.4 ----------------------------------------------------------------------------------------


def next_token_loss(logits, input_ids):
    """logits (N, S, V), input_ids (N, S) -> scalar, nats per token"""
    predictions, targets = logits[:, :-1], input_ids[:, 1:]  # position s predicts token s + 1
    return F.cross_entropy(predictions.flatten(0, 1), targets.flatten())


def _own(scores: Tensor, targets: Tensor) -> Tensor:
    """The score of each target: (N, S, V), (N, S) -> (N, S)."""
    return scores.gather(-1, targets[..., None]).squeeze(-1)


def _priced(logits: Tensor, targets: Tensor) -> Tensor:
    """What each target costs, (N, S)."""
    return -_own(logits.log_softmax(-1), targets)


NEXT_TOKEN_LOSS = Exercise(
    key="1.4",
    title="next-token loss",
    reference=next_token_loss,
    imports=("import torch.nn.functional as F",),
    package=pretrain.next_token_loss,
    others=(
        Answer(
            "gather",
            lambda logits, ids: _priced(logits[:, :-1], ids[:, 1:]).mean(),
            "take the log-softmax, pick each target's entry with gather, and average.",
        ),
    ),
    wrong=(
        Answer(
            "no shift",
            lambda logits, ids: _priced(logits, ids).mean(),
            "There is no shift: you ask each position for the token it has just read. The logits "
            "at position s predict token s + 1.",
        ),
        Answer(
            "shifted the wrong way",
            lambda logits, ids: _priced(logits[:, 1:], ids[:, :-1]).mean(),
            "The shift goes the wrong way: you ask each position for the token before it.",
        ),
        Answer(
            "sum",
            lambda logits, ids: _priced(logits[:, :-1], ids[:, 1:]).sum(),
            "That is the sum over all tokens. A sum grows with the batch, and the step with it: "
            "take the mean.",
        ),
        Answer(
            "divided by S",
            lambda logits, ids: _priced(logits[:, :-1], ids[:, 1:]).sum() / ids.numel(),
            "You divide by the number of tokens. The first token of a window is predicted by "
            "nobody, so there are only S - 1 predictions in each.",
        ),
        Answer(
            "softmax twice",
            lambda logits, ids: _priced(logits.softmax(-1)[:, :-1], ids[:, 1:]).mean(),
            "A softmax is applied twice: cross_entropy wants the logits themselves.",
        ),
        Answer(
            "probability instead of its logarithm",
            lambda logits, ids: (1 - (-_priced(logits[:, :-1], ids[:, 1:])).exp()).mean(),
            "You average 1 - p. The price of a token is -ln p: it has no upper bound.",
        ),
        Answer(
            "logarithm of the softmax",
            lambda logits, ids: -_own(logits[:, :-1].softmax(-1), ids[:, 1:]).log().mean(),
            "You take the softmax and then its logarithm. Where the model is sure, a probability "
            "underflows to 0 and the price is infinite: log_softmax does both in one safe step.",
        ),
        Answer(
            "detached",
            lambda logits, ids: next_token_loss(logits, ids).detach(),
            "The number is right, but the gradient is cut off (detach, item or no_grad), so "
            "nothing can learn from it.",
        ),
    ),
    cases=(
        Case(
            "worked by hand",
            (
                torch.tensor([[[0.0, math.log(2), 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]),
                torch.tensor([[0, 1, 2]]),
            ),
        ),
        Case("two windows", (wave(2, 4, 5), torch.tensor([[0, 3, 3, 1], [4, 0, 2, 2]]))),
        Case(
            "a very sure model",
            (
                torch.tensor([[[1000.0, 0.0]] * 2, [[0.0, 900.0]] * 2]),
                torch.tensor([[0, 1], [1, 1]]),
            ),
        ),
    ),
    hints=(
        "Which positions predict something you can check, and which tokens are predicted?",
        "predictions = logits[:, :-1], targets = input_ids[:, 1:].",
        "F.cross_entropy wants (tokens, V) and (tokens,): flatten windows and positions together.",
    ),
    gradient=(0,),
    lapses=(
        lambda logits, ids: F.cross_entropy(  # windows and positions mixed up
            logits[:, :-1].flatten(0, 1), ids[:, 1:].t().flatten()
        ),
        lambda logits, ids: _priced(logits.squeeze()[:, :-1], ids.squeeze()[:, 1:]).mean(),
    ),
)


# 1.5 ----------------------------------------------------------------------------------------


def next_token_log_probs(logits, temperature):
    """logits (..., V) -> (..., V), the log-probability of each token"""
    return (logits / temperature).log_softmax(dim=-1)


LOG_PROBS_AT_A_TEMPERATURE = Exercise(
    key="1.5",
    title="log-probs at a temperature",
    reference=next_token_log_probs,
    imports=(),
    package=lambda logits, t: logprobs.next_token_log_probs(logits, temperature=t),
    others=(
        Answer(
            "subtract the logsumexp",
            lambda z, t: z / t - (z / t).logsumexp(-1, keepdim=True),
            "z / T minus its logsumexp.",
        ),
    ),
    wrong=(
        Answer(
            "multiplied",
            lambda z, t: (z * t).log_softmax(-1),
            "You multiply by the temperature, so hot is cold: a low one must sharpen.",
        ),
        Answer(
            "divided after the softmax",
            lambda z, t: z.log_softmax(-1) / t,
            "You divide the log-probs, after the softmax. The result no longer sums to 1: divide "
            "the logits, and let the softmax normalise.",
        ),
        Answer(
            "probabilities",
            lambda z, t: (z / t).softmax(-1),
            "These are probabilities. Their logarithms are asked for: log_softmax.",
        ),
        Answer(
            "over the wrong dimension",
            lambda z, t: (z / t).log_softmax(0),
            "The softmax runs over the first dimension. Each row over the vocabulary (the last "
            "dimension) is a distribution.",
        ),
        Answer(
            "divided inside the logarithm",
            lambda z, t: (z.softmax(-1) / t).log(),
            "You divide the probabilities by T, which only shifts their logarithms. Divide the "
            "logits, before the softmax.",
        ),
        Answer(
            "logarithm of the softmax",
            lambda z, t: (z / t).softmax(-1).log(),
            "You take the softmax and then its logarithm. A small probability underflows to 0, and "
            "its logarithm is minus infinity: log_softmax does both in one safe step.",
        ),
        Answer(
            "no temperature",
            lambda z, t: z.log_softmax(-1),
            "The temperature is not used.",
        ),
    ),
    cases=(
        Case("a quarter and three quarters at 0.5", (torch.tensor([0.25, 0.75]).log(), 0.5)),
        Case("a batch at 2", (wave(2, 3, 4), 2.0)),
        Case("a very sure model", (torch.tensor([[[1000.0, 0.0, -500.0]]]), 0.5)),
    ),
    hints=(
        "At which point must T act: before or after the softmax? Only one leaves a sum of 1.",
        "Divide the logits.",
        "tensor.log_softmax(dim=-1) normalises over the vocabulary, whatever comes before it.",
    ),
    gradient=(0,),
    lapses=(
        lambda z, t: (z / t).log_softmax(2),
        lambda z, t: (z / t).flatten().log_softmax(0).view(z.shape),
    ),
)

EXERCISES = (
    BIGRAM_ENTROPY,
    CAUSAL_MASK,
    ATTENTION,
    NEXT_TOKEN_LOSS,
    LOG_PROBS_AT_A_TEMPERATURE,
)
