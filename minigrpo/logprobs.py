"""Log-probabilities of tokens and of whole sequences, in nats: what every objective is made of.

They stay in log space: a product of 100 probabilities underflows float32, a sum of logs does not.
"""

from functools import partial
from inspect import signature

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minigrpo import checks

SLICE = 2**24  # logits that are copied at a time, 64 MiB in float32
SHORT = 512  # up to so many prompt tokens, logits are made at all positions: at the last one alone,
# a copy of the model may round differently, and the KL to a reference would not begin at exactly 0


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """(N, S), 1 = real -> (N, S): only real tokens count, so that left padding moves nothing."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def past_padding(mask: Tensor, new: int) -> dict[str, Tensor]:
    """What lets a model read past padding: the mask (N, S), positions of the `new` last tokens."""
    positions = positions_from_mask(mask)[:, mask.shape[1] - new :]
    return {"attention_mask": mask.long(), "position_ids": positions}


def next_token_pairs(logits: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions (N, S-1, V), targets (N, S-1): `logits[:, s]` has read 0..s, predicts s + 1."""
    return logits[:, :-1], input_ids[:, 1:]


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
    checks.check_sampling(temperature, top_k, top_p)
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


def _only(log_probs: Tensor, tokens: Tensor, chosen: Tensor | bool) -> Tensor:
    """Renormalized over those of the tokens (..., K) that are chosen."""
    keep = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(-1, tokens, chosen)
    return torch.log_softmax(log_probs.masked_fill(~keep, -float("inf")), dim=-1)


def token_log_probs(
    model: nn.Module,
    input_ids: Tensor,  # (N, S)
    attention_mask: Tensor | None = None,  # (N, S), 1 = real token; None = no padding
    *,
    temperature: float = 1.0,  # this and the next two: as the text was sampled
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Log-probs (N, S-1) of every token given the tokens before it, in one forward pass.

    Column s scores `input_ids[:, s + 1]`: the first token has nothing before it, so it has no
    column. Exactly 0, without gradient, where a token or the one before it is padding.
    """
    if input_ids.dim() != 2:  # of three dimensions, the wrong one might be shifted
        raise ValueError(f"input_ids: expected (N, S), got {tuple(input_ids.shape)}")
    padding = {}
    if attention_mask is not None:
        checks.check_mask("attention_mask", attention_mask, input_ids.shape)
        checks.check_one_piece("attention_mask", attention_mask)
        padding = past_padding(attention_mask, input_ids.shape[1])
    predictions, targets = next_token_pairs(model(input_ids, **padding).logits, input_ids)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    distribution = next_token_log_probs(predictions, **settings)  # (N, S-1, V)
    log_probs = distribution.gather(-1, targets[..., None]).squeeze(-1)
    if attention_mask is None:
        return log_probs
    real = attention_mask.bool()
    return torch.where(real[:, 1:] & real[:, :-1], log_probs, 0.0)


def completion_logits(
    model: nn.Module,
    prompt_ids: Tensor,  # (N, P)
    prompt_mask: Tensor,  # (N, P), padded on the left, 1 = real token
    completions: Tensor,  # (N, T)
    completion_mask: Tensor,  # (N, T), 1 up to and including EOS
) -> list[Tensor]:
    """Logits (N, T, V), with gradient, in one or two pieces, since to join them is to copy them.

    Column t has read all before completion token t. Each different prompt is read once, however
    many rows answer it; they go on from its keys and values, through which the gradient flows back.
    """
    checks.check_prompts("prompt_mask", prompt_mask, prompt_ids)
    checks.check_shape("completion_mask", completion_mask, completions.shape)
    readable = torch.cat([prompt_mask.bool(), completion_mask.bool()], dim=1)  # (N, P + T)
    checks.check_one_piece("completion_mask", readable)
    # A prompt is its tokens and its mask; `source` says which one each row answers.
    keys = torch.cat([prompt_ids, prompt_mask.to(prompt_ids.dtype)], dim=1)
    different, source = keys.unique(dim=0, return_inverse=True)  # (U, 2 P), (N,)
    T, padded = completions.shape[1], not bool(prompt_mask.all())

    def read(ids: Tensor, mask: Tensor, cache=None, **options):  # mask: of all that's read by then
        options |= past_padding(mask, ids.shape[1]) if padded else {}
        return model(ids, past_key_values=cache, use_cache=True, **options)

    short = different.numel() <= 2 * SHORT  # ids and mask
    output = read(*different.chunk(2, dim=1), **({} if short else only_last(model)))
    cache = output.past_key_values
    if cache is None:  # a model that keeps none reads every row from the start
        whole = torch.cat([prompt_ids, completions[:, :-1]], dim=1)
        padding = past_padding(readable[:, :-1], whole.shape[1]) if padded else {}
        return [model(whole, **padding | dict.fromkeys(only_last(model), T)).logits[:, -T:]]
    logits = output.logits[source, -1:]  # (N, 1, V): what comes right after the prompt
    if T == 1:  # the last token predicts nothing that is scored
        return [logits]
    cache.batch_select_indices(source)
    return [logits, read(completions[:, :-1], readable[:, :-1], cache=cache).logits]


def only_last(model: nn.Module) -> dict[str, int]:
    """What makes a transformers model return the logits of its last position alone; or nothing."""
    return {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}


def completion_log_probs_and_entropy(
    model: nn.Module,
    prompt_ids: Tensor,  # these four: see `completion_logits`, and `Rollouts.text`
    prompt_mask: Tensor,
    completions: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, T) of the completions, with gradient, exactly 0 where masked.

    Keeps no copy of the logits (N, T, V), in any precision; only their gradient is as large.
    """
    checks.check_sampling(temperature, None, None)
    pieces = completion_logits(model, prompt_ids, prompt_mask, completions, completion_mask)
    tokens = completions.split([logits.shape[1] for logits in pieces], dim=1)
    scored = [_score(*pair, temperature, entropy_gradient) for pair in zip(pieces, tokens)]
    log_probs, entropy = (torch.cat(values, dim=1) for values in zip(*scored))
    real = completion_mask.bool()
    return torch.where(real, log_probs, 0.0), torch.where(real, entropy, 0.0)


def _score(
    logits: Tensor, tokens: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, T) of tokens, from logits (N, T, V), a few positions at a time.

    The copies that a slice needs are made again in the backward pass, so none of them is kept.
    """

    def score_slice(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:  # (n, V), (n,)
        rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        rows = rows if temperature == 1 else rows / temperature
        log_probs = rows.gather(-1, ids[:, None])[:, 0] - rows.logsumexp(dim=-1)
        return log_probs, token_entropy(rows if entropy_gradient else rows.detach())

    again = partial(checkpoint, score_slice, use_reentrant=False, preserve_rng_state=False)
    (N, T, V), score = logits.shape, again if logits.numel() > SLICE else score_slice
    slices = (x.flatten(0, 1).split(max(1, SLICE // V)) for x in (logits, tokens))
    scored = [score(rows, ids) for rows, ids in zip(*slices)]
    log_probs, entropy = (torch.cat(values).view(N, T) for values in zip(*scored))
    return log_probs, entropy


def sequence_log_probs(log_probs: Tensor, mask: Tensor) -> Tensor:
    """log pi(o | q) = sum_t log pi(o_t | q, o_<t): (N, T) and its mask -> (N,), in nats."""
    checks.check_log_probs("log_probs", log_probs, log_probs.shape)
    checks.check_mask("mask", mask, log_probs.shape)
    return torch.where(mask.bool(), log_probs, 0.0).sum(dim=-1)


def token_entropy(logits: Tensor) -> Tensor:
    """(..., V) -> (...), nats, with gradient: 0 = the next token is certain, ln V = uniform."""
    log_probs = torch.log_softmax(logits, dim=-1)
    # p log p -> 0 as p -> 0; where() on the inside keeps 0 * -inf out of the gradient too.
    finite = torch.where(log_probs.isneginf(), 0.0, log_probs)
    return -(log_probs.exp() * finite).sum(dim=-1)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where the mask is 1, over everything or along `dim`; the others are never read."""
    checks.check_shape("mask", mask, values.shape)
    return torch.where(mask.bool(), values, 0.0).sum(dim=dim) / mask.bool().sum(dim=dim)
