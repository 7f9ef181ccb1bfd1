"""Log-probabilities of tokens and of whole sequences: what every objective here is made of.

Everything stays in log space: a product of 100 probabilities underflows float32, their sum of
logarithms does not. All numbers are in nats.
"""

from __future__ import annotations

import math
from numbers import Integral

import torch
from torch import Tensor, nn

from minigrpo.gpt import next_token_pairs, positions_from_mask


def next_token_log_probs(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """The distribution a token is drawn from: `sample` and `token_log_probs` share it.

    Divides the logits by the temperature, keeps the `top_k` likeliest tokens, then the fewest of
    those whose probabilities reach `top_p` (nucleus, Holtzman et al. 2020, arXiv 1904.09751),
    and renormalises. Tokens cut off get -inf. Half-precision logits are computed in float32.

    Args:
        logits: (..., V).
        temperature: above 0. Below 1 sharpens, above 1 flattens; `top_k=1` is greedy.
        top_k: keep that many tokens, 1 or more; None keeps all.
        top_p: keep that much probability, in (0, 1]; None keeps all.

    Returns:
        (..., V), each row a normalised log-distribution.

    Raises:
        ValueError: a setting out of range.
    """
    check_sampling_settings(temperature, top_k, top_p)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    if top_k is not None and top_k < log_probs.shape[-1]:
        keep = torch.zeros_like(log_probs, dtype=torch.bool)
        keep.scatter_(-1, log_probs.topk(top_k, dim=-1).indices, True)
        log_probs = _renormalise(log_probs, keep)
    if top_p is not None and top_p < 1:
        descending = log_probs.sort(dim=-1, descending=True)
        probs = descending.values.exp()
        # The probability before a token decides: the one that crosses top_p is still kept.
        keep = (probs.cumsum(dim=-1) - probs) < top_p
        keep = torch.zeros_like(keep).scatter_(-1, descending.indices, keep)
        log_probs = _renormalise(log_probs, keep)
    return log_probs


def _renormalise(log_probs: Tensor, keep: Tensor) -> Tensor:
    return torch.log_softmax(log_probs.masked_fill(~keep, -math.inf), dim=-1)


def is_whole_number(value: object) -> bool:
    """Whether this counts something: an int of Python or numpy; 2.0 and True do not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_sampling_settings(
    temperature: float, top_k: int | None = None, top_p: float | None = None
) -> None:
    """Raise ValueError, naming the argument, unless the three settings describe a distribution."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature: expected a finite number above 0, got {temperature} "
            "(for the likeliest token every time, use top_k=1)"
        )
    if top_k is not None and not (is_whole_number(top_k) and top_k >= 1):
        raise ValueError(f"top_k: expected a whole number of 1 or more, or None, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], or None, got {top_p}")


def token_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Log-probability of every token given the tokens before it, in one forward pass.

    Column s scores `input_ids[:, s + 1]`: the first token has nothing before it, so it has no
    column. Where a token or the one before it is padding the log-prob is exactly 0, and nothing
    flows back. Score with the settings the text was sampled with: otherwise the numbers belong to
    another distribution.

    Args:
        model: a policy (`.logits` of shape (N, S, V)).
        input_ids: (N, S), S of 2 or more.
        attention_mask: (N, S), 1 = real token; None = all real. Padding may lie on either side.
        temperature, top_k, top_p: as in `next_token_log_probs`.

    Returns:
        (N, S-1) log-probs in nats; they carry the gradient unless called under `no_grad`.

    Raises:
        ValueError: wrong shapes, a row without a real token, settings out of range, or logits of
            a real token that are no distribution (NaN, +inf, or all -inf).
    """
    return _score(model, input_ids, attention_mask, temperature, top_k, top_p)[0]


def token_log_probs_and_entropy(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`token_log_probs`, and beside it the entropy of the distribution each token was drawn from.

    Arguments and errors as there. Returns two (N, S-1) tensors in nats, both with gradient, both
    exactly 0 at padding.
    """
    log_probs, distribution, scored = _score(
        model, input_ids, attention_mask, temperature, None, None
    )
    return log_probs, torch.where(scored, token_entropy(distribution), 0.0)


def completion_log_probs_and_entropy(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completions: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """What `token_log_probs_and_entropy` says of the completions, with less work.

    Each different prompt is read once, however many rows answer it; the completions go on from the
    keys and values of that reading, through which the gradient flows back into it. A model that
    returns no cache reads every row from the start.

    Args:
        model: a policy.
        prompt_ids, prompt_mask: (N, P), padded on the left, 1 = real token.
        completions, completion_mask: (N, T), 1 up to and including EOS.
        temperature: as in `next_token_log_probs`.

    Returns:
        log-probs and entropies (N, T) in nats, both with gradient, both exactly 0 where masked.

    Raises:
        ValueError: masks of a wrong shape, a prompt without a token or padded on the right, logits
            of a real token that are no distribution, or a setting out of range.
    """
    check_sampling_settings(temperature)
    check_mask("prompt_mask", prompt_mask, prompt_ids.shape)
    if not prompt_mask.bool()[:, -1].all():
        raise ValueError("prompt_mask: expected prompts padded on the left, got padding at the end")
    if completion_mask.shape != completions.shape:
        raise ValueError(
            f"completion_mask: expected shape {tuple(completions.shape)}, "
            f"got {tuple(completion_mask.shape)}"
        )
    real = completion_mask.bool()
    # A prompt is its tokens and its mask; `source` says which one each row answers.
    keys = torch.cat([prompt_ids, prompt_mask.to(prompt_ids.dtype)], dim=1)
    different, source = keys.unique(dim=0, return_inverse=True)  # (U, 2 P), (N,)
    ids, mask = different.chunk(2, dim=1)
    padded = not bool(prompt_mask.all())
    output = model(
        ids,
        attention_mask=mask if padded else None,
        position_ids=positions_from_mask(mask) if padded else None,
        use_cache=True,
    )
    cache = output.past_key_values
    if cache is None:
        log_probs, entropy = token_log_probs_and_entropy(
            model,
            torch.cat([prompt_ids, completions], dim=1),
            torch.cat([prompt_mask.bool(), real], dim=1),
            temperature=temperature,
        )
        T = completions.shape[1]
        return log_probs[:, -T:], entropy[:, -T:]
    logits = output.logits[source, -1:]  # (N, 1, V): what comes right after the prompt
    if completions.shape[1] > 1:  # the last token predicts nothing that is scored
        cache.batch_select_indices(source)
        # Padding on the right needs no mask: nothing real comes after it.
        seen = torch.cat([prompt_mask.bool(), real[:, :-1]], dim=1) if padded else None
        later = model(
            completions[:, :-1],
            attention_mask=_as_ids(seen),
            position_ids=positions_from_mask(seen)[:, prompt_ids.shape[1] :] if padded else None,
            past_key_values=cache,
            use_cache=True,
        ).logits
        logits = torch.cat([logits, later], dim=1)  # (N, T, V)
    distribution = next_token_log_probs(logits, temperature=temperature)
    log_probs = distribution.gather(-1, completions[..., None]).squeeze(-1)
    log_probs = torch.where(real, log_probs, 0.0)
    check_distribution("model", log_probs)
    return log_probs, torch.where(real, token_entropy(distribution), 0.0)


def _score(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One forward pass: log-probs (N, S-1), the distributions (N, S-1, V), and which columns score
    a real token after a real token (N, S-1)."""
    check_sampling_settings(temperature, top_k, top_p)
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise ValueError(
            f"input_ids: expected shape (N, S) with S of 2 or more, got {tuple(input_ids.shape)}"
        )
    check_mask("attention_mask", attention_mask, input_ids.shape)
    position_ids = None if attention_mask is None else positions_from_mask(attention_mask)
    logits = model(
        input_ids, attention_mask=_as_ids(attention_mask), position_ids=position_ids
    ).logits
    predictions, targets = next_token_pairs(logits, input_ids)
    distribution = next_token_log_probs(
        predictions, temperature=temperature, top_k=top_k, top_p=top_p
    )
    log_probs = distribution.gather(-1, targets[..., None]).squeeze(-1)
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    scored = real.bool()[:, 1:] & real.bool()[:, :-1]
    if attention_mask is not None:
        log_probs = torch.where(scored, log_probs, 0.0)
    check_distribution("model", log_probs)
    return log_probs, distribution, scored


def _as_ids(mask: Tensor | None) -> Tensor | None:
    """Hugging Face models expect a mask of whole numbers."""
    return None if mask is None else mask.long()


def check_distribution(name: str, log_probs: Tensor) -> None:
    """Raise ValueError if any log-prob is NaN, which is what a softmax makes of bad logits."""
    bad = log_probs.isnan()
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name}: expected finite logits, but those at row {where[0]}, column {where[1]} are "
            "not a distribution (NaN, +inf, or -inf for every token)"
        )


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the mask is None, or has this shape and a real token in every row."""
    if mask is None:
        return
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(mask.shape)}")
    empty = ~mask.bool().any(dim=-1)
    if empty.any():
        raise ValueError(
            f"{name}: expected at least one real token in every row, got none in row "
            f"{int(empty.nonzero()[0])}"
        )


def check_floating_point(name: str, log_probs: Tensor) -> None:
    """Raise TypeError for a tensor of whole numbers."""
    if not log_probs.is_floating_point():
        raise TypeError(
            f"{name}: expected floating point, got {log_probs.dtype} (are these token ids?)"
        )


def sequence_log_probs(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of each whole sequence: the sum over its real tokens.

    log pi(o | q) = sum_t log pi(o_t | q, o_<t), the chain rule of probability.

    Args:
        log_probs: (N, T) floating point.
        mask: (N, T), 1 = real token. What stands where the mask is 0 is never read, so it may be
            anything, infinities and NaN too.

    Returns:
        (N,) in nats.

    Raises:
        TypeError: log_probs are whole numbers (token ids, most likely).
        ValueError: shapes that differ, or a row without a real token.
    """
    check_floating_point("log_probs", log_probs)
    check_mask("mask", mask, log_probs.shape)
    return torch.where(mask.bool(), log_probs, 0.0).sum(dim=-1)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy of each next-token distribution, in nats: 0 = certain, ln V = uniform.

    logits (..., V) -> (...). Carries the gradient. A token with logit -inf has probability 0 and
    adds nothing.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    # p log p -> 0 as p -> 0; where() on the inside keeps 0 * -inf out of the gradient too.
    finite = torch.where(log_probs.isneginf(), 0.0, log_probs)
    return -(log_probs.exp() * finite).sum(dim=-1)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values where the mask is 1; the others are never read.

    values and mask of one shape. dim None: one mean over everything, every token the same weight.

    Raises:
        ValueError: shapes that differ, or nothing to average (in a row, if dim is given).
    """
    if values.shape != mask.shape:
        raise ValueError(f"mask: expected shape {tuple(values.shape)}, got {tuple(mask.shape)}")
    keep = mask.bool()
    count = keep.sum() if dim is None else keep.sum(dim=dim)
    if (count == 0).any():
        raise ValueError("mask: expected at least one 1 in everything averaged, got none")
    kept = torch.where(keep, values, 0.0)
    return (kept.sum() if dim is None else kept.sum(dim=dim)) / count
