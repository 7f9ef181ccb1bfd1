"""Log-probabilities of tokens and of whole sequences, in nats: what every objective is made of.

They stay in log space: a product of 100 probabilities underflows float32, a sum of logs does not.
"""

import inspect
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minigrpo.checks import check_log_probs, check_mask, check_prompts, check_sampling, check_shape
from minigrpo.gpt import next_token_pairs, positions_from_mask

SLICE = 2**24  # logits that are copied at a time, 64 MiB in float32


def next_token_log_probs(
    logits: Tensor,  # (..., V)
    *,
    temperature: float = 1.0,  # below 1 sharpens, above 1 flattens
    top_k: int | None = None,  # keep that many tokens; 1 is greedy
    top_p: float | None = None,  # keep that much probability, in (0, 1]
) -> Tensor:
    """The log-distribution (..., V) a token is drawn from: samplers and scorers share it.

    Divides by the temperature, keeps the `top_k` likeliest tokens, then the fewest of those whose
    probabilities reach `top_p` (nucleus, Holtzman et al. 2020, arXiv 1904.09751), and renormalizes.
    Tokens cut off get -inf. Logits of half precision are computed in float32.
    """
    check_sampling(temperature, top_k, top_p)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    if top_k is not None and top_k < log_probs.shape[-1]:
        log_probs = _only(log_probs, log_probs.topk(top_k, dim=-1).indices, True)
    if top_p is not None and top_p < 1:
        ordered, tokens = log_probs.sort(dim=-1, descending=True)
        probs = ordered.exp()
        # The probability before a token decides: the one that crosses top_p is still kept.
        log_probs = _only(log_probs, tokens, probs.cumsum(dim=-1) - probs < top_p)
    return log_probs


def _only(log_probs: Tensor, tokens: Tensor, kept: Tensor | bool) -> Tensor:
    """Renormalized over those of the tokens (..., K) that are kept."""
    keep = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(-1, tokens, kept)
    return torch.log_softmax(log_probs.masked_fill(~keep, -float("inf")), dim=-1)


def token_log_probs(
    model: nn.Module,
    input_ids: Tensor,  # (N, S)
    attention_mask: Tensor | None = None,  # (N, S), 1 = real token; None = no padding
    *,
    temperature: float = 1.0,  # as the text was sampled
    **cut: float | None,  # top_k and top_p, too
) -> Tensor:
    """Log-probs (N, S-1) of every token given the tokens before it, in one forward pass.

    Column s scores `input_ids[:, s + 1]`: the first token has nothing before it, so it has no
    column. Exactly 0, without gradient, where a token or the one before it is padding.
    """
    if input_ids.dim() != 2:  # of three dimensions, the wrong one might be shifted
        raise ValueError(f"input_ids: expected (N, S), got {tuple(input_ids.shape)}")
    predictions, targets = next_token_pairs(_logits(model, input_ids, attention_mask), input_ids)
    distribution = next_token_log_probs(predictions, temperature=temperature, **cut)  # (N, S-1, V)
    log_probs = distribution.gather(-1, targets[..., None]).squeeze(-1)
    if attention_mask is None:
        return log_probs
    real = attention_mask.bool()
    return torch.where(real[:, 1:] & real[:, :-1], log_probs, 0.0)


def _logits(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, last: int = 0
) -> Tensor:
    """(N, S, V), or of the last positions alone. Padding on the left moves no position."""
    given = {"attention_mask": None, "position_ids": None}
    if attention_mask is not None:
        check_mask("attention_mask", attention_mask, input_ids.shape)
        given["attention_mask"] = attention_mask.long()
        given["position_ids"] = positions_from_mask(attention_mask)
    given |= {"use_cache": False, **only_last(model, last)} if last else {}
    return model(input_ids, **given).logits[:, -last:]


def completion_logits(
    model: nn.Module,
    prompt_ids: Tensor,  # (N, P)
    prompt_mask: Tensor,  # (N, P), padded on the left, 1 = real token
    completions: Tensor,  # (N, T)
    completion_mask: Tensor,  # (N, T), 1 up to and including EOS
) -> Tensor:
    """Logits (N, T, V), with gradient: column t has read all that comes before completion token t.

    Each different prompt is read once, however many rows answer it. The completions go on from the
    keys and values of that reading, through which the gradient flows back into it.
    """
    pieces = _logits_in_pieces(model, prompt_ids, prompt_mask, completions, completion_mask)
    return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]


def _logits_in_pieces(model, prompt_ids, prompt_mask, completions, completion_mask) -> list[Tensor]:
    """`completion_logits` as one or two tensors, since to join them is to copy them."""
    check_prompts("prompt_mask", prompt_mask, prompt_ids)
    check_shape("completion_mask", completion_mask, completions.shape)
    seen = torch.cat([prompt_mask.bool(), completion_mask.bool()], dim=1)  # (N, P + T)
    # A prompt is its tokens and its mask; `source` says which one each row answers.
    keys = torch.cat([prompt_ids, prompt_mask.to(prompt_ids.dtype)], dim=1)
    different, source = keys.unique(dim=0, return_inverse=True)  # (U, 2 P), (N,)
    T, padded = completions.shape[1], not bool(prompt_mask.all())

    def read(ids: Tensor, mask: Tensor, cache=None, **given):  # mask: of all that's read by then
        positions = positions_from_mask(mask)[:, -ids.shape[1] :]
        given |= {"attention_mask": mask.long(), "position_ids": positions} if padded else {}
        return model(ids, past_key_values=cache, use_cache=True, **given)

    cache = None
    if not recomputes(model):  # or its layers keep no cache
        # Of a short prompt all logits: for single positions a copy of the model may round
        # differently, and the KL to a reference would not begin at exactly 0.
        short = different.numel() <= 1024
        output = read(*different.chunk(2, dim=1), **({} if short else only_last(model, 1)))
        cache = output.past_key_values
    if cache is None:  # every row is read from the start
        whole = torch.cat([prompt_ids, completions[:, :-1]], dim=1)
        return [_logits(model, whole, seen[:, :-1], last=T)]
    logits = output.logits[source, -1:]  # (N, 1, V): what comes right after the prompt
    if T == 1:  # the last token predicts nothing that is scored
        return [logits]
    cache.batch_select_indices(source)
    return [logits, read(completions[:, :-1], seen[:, :-1], cache=cache).logits]


def only_last(model: nn.Module, positions: int) -> dict[str, int]:
    """What makes a transformers model return the logits of its last positions alone; or nothing."""
    parameters = inspect.signature(getattr(model, "module", model).forward).parameters
    return {"logits_to_keep": positions} if "logits_to_keep" in parameters else {}


def recomputes(model: nn.Module) -> bool:
    """Whether its layers are to be run again in the backward pass (gradient checkpointing)."""
    return any(getattr(m, "gradient_checkpointing", False) and m.training for m in model.modules())


def completion_log_probs_and_entropy(
    model: nn.Module, *text: Tensor, temperature: float = 1.0, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, T) of the completions, with gradient, exactly 0 where masked.

    text: prompt_ids, prompt_mask, completions, completion_mask, see `completion_logits`. Of the
    logits (N, T, V) no copy is kept, in any precision, and their gradient alone is as large.
    """
    check_sampling(temperature, None, None)
    completions, real = text[2], text[3].bool()
    found, at = [], 0
    for logits in _logits_in_pieces(model, *text):  # (N, columns, V)
        tokens = completions[:, at : at + logits.shape[1]]
        found.append(_score(logits, tokens, temperature, entropy_gradient))
        at += logits.shape[1]
    log_probs, entropy = (torch.cat(pieces, dim=1) for pieces in zip(*found))
    return torch.where(real, log_probs, 0.0), torch.where(real, entropy, 0.0)


def _score(
    logits: Tensor, tokens: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, T) of tokens, from logits (N, T, V), a few positions at a time.

    The copies that a slice needs are made again in the backward pass, so none of them is kept.
    """

    def score_slice(part: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:  # (n, V), (n,)
        part = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
        part = part if temperature == 1 else part / temperature
        log_probs = part.gather(-1, ids[:, None])[:, 0] - part.logsumexp(dim=-1)
        return log_probs, token_entropy(part if entropy_gradient else part.detach())

    again = partial(checkpoint, score_slice, use_reentrant=False, preserve_rng_state=False)
    (N, T, V), score = logits.shape, again if logits.numel() > SLICE else score_slice
    pieces = (x.flatten(0, 1).split(max(1, SLICE // V)) for x in (logits, tokens))
    found = [score(part, ids) for part, ids in zip(*pieces)]
    log_probs, entropy = (torch.cat(values).view(N, T) for values in zip(*found))
    return log_probs, entropy


def sequence_log_probs(log_probs: Tensor, mask: Tensor) -> Tensor:
    """log pi(o | q) = sum_t log pi(o_t | q, o_<t): (N, T) and its mask -> (N,), in nats."""
    check_log_probs("log_probs", log_probs, log_probs.shape)
    check_mask("mask", mask, log_probs.shape)
    return torch.where(mask.bool(), log_probs, 0.0).sum(dim=-1)


def token_entropy(logits: Tensor) -> Tensor:
    """(..., V) -> (...), nats, with gradient: 0 = the next token is certain, ln V = uniform."""
    log_probs = torch.log_softmax(logits, dim=-1)
    # p log p -> 0 as p -> 0; where() on the inside keeps 0 * -inf out of the gradient too.
    finite = torch.where(log_probs.isneginf(), 0.0, log_probs)
    return -(log_probs.exp() * finite).sum(dim=-1)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where the mask is 1, over everything or along `dim`; the others are never read."""
    check_shape("mask", mask, values.shape)
    return torch.where(mask.bool(), values, 0.0).sum(dim=dim) / mask.bool().sum(dim=dim)
