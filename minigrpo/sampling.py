"""Sampling from a policy: batched, cached, ragged. A row that has ended costs nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from minigrpo.gpt import positions_from_mask
from minigrpo.logprobs import (
    check_distribution,
    check_mask,
    check_sampling_settings,
    is_whole_number,
    next_token_log_probs,
)


@dataclass(frozen=True)
class Rollouts:
    """What `sample` returns: N prompts, each with the completion the policy wrote after it.

    Attributes:
        prompt_ids: (N, P) token ids, padded on the left.
        prompt_mask: (N, P) bool, True = real token.
        completions: (N, T) token ids; after a row has ended, `pad_id`.
        completion_mask: (N, T) bool, True up to and including the first EOS.
        log_probs: (N, T) log-probability in nats with which each token was drawn; 0 where masked.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completions: Tensor
    completion_mask: Tensor
    log_probs: Tensor

    @property
    def input_ids(self) -> Tensor:
        """(N, P + T): prompt and completion, ready to be scored."""
        return torch.cat([self.prompt_ids, self.completions], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """(N, P + T) bool: the mask that belongs to `input_ids`."""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    def to(self, device: torch.device | str) -> Rollouts:
        """The same on another device."""
        return Rollouts(*(getattr(self, field.name).to(device) for field in fields(self)))


def left_pad(sequences: Sequence[Tensor], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Stack token sequences of different lengths so that all of them end in the last column.

    Prompts are padded on the left because the next token is written to the right of the last one.

    Returns:
        ids (N, longest) and mask (N, longest) bool, True = real token.

    Raises:
        ValueError: no sequences, or one that is empty.
    """
    if not sequences or any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("sequences: expected one or more, each with at least one token")
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, longest - len(sequence) :] = torch.as_tensor(sequence)
        mask[row, longest - len(sequence) :] = True
    return ids, mask


def stop_ids(eos_id: int | Sequence[int] | None) -> tuple[int, ...]:
    """The ids that end a completion: none, one, or several (chat models often have two).

    Raises:
        TypeError: something that is no token id.
    """
    ids = () if eos_id is None else (eos_id,) if is_whole_number(eos_id) else eos_id
    if not isinstance(ids, (list, tuple)) or not all(map(is_whole_number, ids)):
        raise TypeError(f"eos_id: expected a token id, several, or None, got {eos_id!r}")
    return tuple(ids)


def is_stop(tokens: Tensor, eos_id: int | Sequence[int] | None) -> Tensor:
    """Which of the tokens end a completion; any shape -> the same shape, bool."""
    return torch.isin(
        tokens, torch.tensor(stop_ids(eos_id), dtype=torch.long, device=tokens.device)
    )


def completion_mask(completions: Tensor, eos_id: int | Sequence[int] | None) -> Tensor:
    """True up to and including the first EOS of each row; all True in a row without one.

    Made from positions: a pad token that happens to have the id of the EOS changes nothing.
    completions (N, T) -> (N, T) bool.
    """
    stops = torch.tensor([] if eos_id is None else eos_id, device=completions.device).reshape(-1)
    is_eos = torch.isin(completions, stops)
    eos_before = is_eos.long().cumsum(dim=1) - is_eos.long()
    return eos_before == 0


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    completions_per_prompt: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | Sequence[int] | None = None,
    pad_id: int = 0,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
    use_cache: bool = True,
) -> Rollouts:
    """Let the policy continue every prompt, one token at a time, all rows at once.

    The prompt is read once; after that each step feeds only the newest token, because the cache
    keeps the keys and values of the earlier ones. A row that has written EOS leaves the batch.
    Training uses temperature only: `top_k` and `top_p` draw from another distribution than the
    policy's own, and then its log-probs are not those of the text.

    Args:
        model: a policy; put it in the mode (eval or train) in which it will be scored.
        prompt_ids: (N, P), left-padded if the prompts differ in length.
        attention_mask: (N, P), 1 = real token; None = no padding.
        max_new_tokens: 1 or more.
        completions_per_prompt: G, 1 or more: continue every prompt so many times. It is read once
            all the same. The rows come prompt by prompt.
        temperature, top_k, top_p: as in `next_token_log_probs`.
        eos_id: the token that ends a row, or several of them; None = every row runs to
            `max_new_tokens`.
        pad_id: fills a row after its end; may equal `eos_id`.
        generator: the source of randomness (of the model's device); the same seed gives the
            same text.
        uniforms: (N * G, max_new_tokens) random numbers from 0 to 1, instead of a generator: row i
            then depends on `uniforms[i]` alone, however the rows are spread over batches.
        use_cache: False reads the whole text again at every step: slow, the same text.

    Returns:
        Rollouts with N * G rows and T = the longest completion.

    Raises:
        TypeError: an `eos_id` or `pad_id` that is no token id.
        ValueError: an empty prompt, a prompt that leaves no room for `max_new_tokens` in the
            model's context, a mask that does not fit, settings out of range, or logits that are
            no distribution.
    """
    check_sampling_settings(temperature, top_k, top_p)
    stops = stop_ids(eos_id)
    if not is_whole_number(pad_id):
        raise TypeError(f"pad_id: expected a token id, got {pad_id!r}")
    for name, count in (
        ("max_new_tokens", max_new_tokens),
        ("completions_per_prompt", completions_per_prompt),
    ):
        if not is_whole_number(count):
            raise ValueError(f"{name}: expected a whole number, got {count!r}")
        if count < 1:
            raise ValueError(f"{name}: expected 1 or more, got {count}")
    device = next((p.device for p in model.parameters()), prompt_ids.device)
    prompt_ids, prompt_mask = _check_prompts(prompt_ids, attention_mask, device)
    _check_room(model, prompt_mask, max_new_tokens)

    if uniforms is not None:
        shape = (len(prompt_ids) * completions_per_prompt, max_new_tokens)
        if tuple(uniforms.shape) != shape:
            raise ValueError(f"uniforms: expected shape {shape}, got {tuple(uniforms.shape)}")
        if not ((uniforms >= 0) & (uniforms <= 1)).all():
            raise ValueError("uniforms: expected numbers from 0 to 1")
        uniforms = uniforms.to(device)
    prompt_ids = prompt_ids.repeat_interleave(completions_per_prompt, dim=0)  # (N G, P)
    prompt_mask = prompt_mask.repeat_interleave(completions_per_prompt, dim=0)
    num_rows, prompt_length = prompt_ids.shape
    ids = torch.full((num_rows, prompt_length + max_new_tokens), pad_id, device=device)
    ids[:, :prompt_length] = prompt_ids
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, :prompt_length] = prompt_mask
    log_probs = None
    padded = not bool(prompt_mask.all())
    active = torch.arange(num_rows, device=device)  # rows still being written
    cache = None
    read = 0  # tokens the cache has already seen

    for end in range(prompt_length, prompt_length + max_new_tokens):
        copies = completions_per_prompt if end == prompt_length else 1
        rows = active[::copies]  # of the copies of a prompt only the first is read
        seen = mask[rows, :end] if padded else None
        output = model(
            ids[rows, read:end],
            attention_mask=None if seen is None else seen.long(),
            position_ids=None if seen is None else positions_from_mask(seen)[:, read:],
            past_key_values=cache,
            use_cache=use_cache,
        )
        cache = output.past_key_values if use_cache else None
        read = end if cache is not None else 0

        distribution = next_token_log_probs(
            output.logits[:, -1], temperature=temperature, top_k=top_k, top_p=top_p
        )
        check_distribution("model", distribution)
        if copies > 1:
            distribution = distribution.repeat_interleave(copies, dim=0)
            if cache is not None:
                cache.batch_repeat_interleave(copies)
        if uniforms is None:
            token = torch.multinomial(distribution.exp(), 1, generator=generator)  # (active, 1)
        else:
            token = _invert(distribution.exp(), uniforms[active, end - prompt_length, None])
        if log_probs is None:
            log_probs = distribution.new_zeros(num_rows, max_new_tokens)
        ids[active, end] = token[:, 0]
        mask[active, end] = True
        log_probs[active, end - prompt_length] = distribution.gather(1, token)[:, 0]

        if stops:
            going = ~is_stop(token[:, 0], stops)
            if not going.all():
                active = active[going]
                if len(active) == 0:
                    break
                if cache is not None:
                    cache.batch_select_indices(going.nonzero()[:, 0])

    stop = end + 1
    return Rollouts(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completions=ids[:, prompt_length:stop],
        completion_mask=mask[:, prompt_length:stop],
        log_probs=log_probs[:, : stop - prompt_length],
    )


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the sum of probabilities (N, V) first exceeds the number. (N, 1)"""
    sums = probabilities.double().cumsum(dim=-1)
    total = sums[:, -1:].contiguous()
    token = torch.searchsorted(sums, uniforms.double() * total, right=True)
    last = torch.searchsorted(sums, total)  # the last token that has any probability
    return torch.minimum(token, last)


def _check_prompts(
    prompt_ids: Tensor, attention_mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    if prompt_ids.dim() != 2 or 0 in prompt_ids.shape:
        raise ValueError(
            "prompt_ids: expected shape (N, P) with at least one row and one token "
            f"(an empty prompt has no next token), got {tuple(prompt_ids.shape)}"
        )
    if prompt_ids.is_floating_point():
        raise ValueError(f"prompt_ids: expected whole numbers (token ids), got {prompt_ids.dtype}")
    check_mask("attention_mask", attention_mask, prompt_ids.shape)
    if attention_mask is None:
        attention_mask = torch.ones_like(prompt_ids)
    real = attention_mask.bool().to(device)
    if not real[:, -1].all():
        row = int((~real[:, -1]).nonzero()[0])
        raise ValueError(
            "attention_mask: expected prompts padded on the left, so that every row ends with a "
            f"real token, got padding at the end of row {row}"
        )
    return prompt_ids.long().to(device), real


def _check_room(model: nn.Module, prompt_mask: Tensor, max_new_tokens: int) -> None:
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    longest = int(prompt_mask.sum(dim=1).max())
    if context is not None and longest + max_new_tokens > context:
        raise ValueError(
            f"prompt_ids: expected at most {context - max_new_tokens} tokens, so that "
            f"{max_new_tokens} new ones fit into the model's context of {context}, got {longest}"
        )
