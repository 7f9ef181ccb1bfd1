"""Sampling from a policy: many completions of many prompts at once. A row that has ended costs
nothing more, and the log-probs it was drawn with are kept: they are the old ones of the ratio.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from minigrpo.checks import check_counts, check_prompts, check_sampling, is_whole_number
from minigrpo.gpt import positions_from_mask
from minigrpo.logprobs import next_token_log_probs

StopIds = int | Sequence[int] | None  # what ends a completion: one token, several, or none


@dataclass(frozen=True)
class Rollouts:
    """N completions, and the prompts they answer."""

    prompt_ids: Tensor  # (N, P), padded on the left
    prompt_mask: Tensor  # (N, P) bool, True = real token
    completions: Tensor  # (N, T), `pad_id` after the end of a row
    completion_mask: Tensor  # (N, T) bool, True up to and including the first EOS
    log_probs: Tensor  # (N, T) nats, with which each token was drawn; 0 where masked

    @property
    def input_ids(self) -> Tensor:  # (N, P + T), ready to be scored
        return torch.cat([self.prompt_ids, self.completions], dim=1)

    @property
    def attention_mask(self) -> Tensor:  # (N, P + T) bool
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    def __getitem__(self, rows: Tensor | slice) -> "Rollouts":
        return Rollouts(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, device: torch.device | str) -> "Rollouts":
        return Rollouts(*(getattr(self, field.name).to(device) for field in fields(self)))


def left_pad(sequences: Sequence[Tensor], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask (N, longest) of rows that all end in the last column, where the text goes on."""
    longest = max(map(len, sequences))
    rows = [pad(torch.as_tensor(s), (longest - len(s), 0), value=pad_id) for s in sequences]
    lengths = torch.tensor([len(s) for s in sequences])
    return torch.stack(rows), torch.arange(longest) >= longest - lengths[:, None]


def stop_ids(eos_id: StopIds) -> tuple[int, ...]:
    """The ids that end a completion. Raises TypeError for what is no token id, such as 2.0."""
    ids = () if eos_id is None else eos_id if isinstance(eos_id, list | tuple) else (eos_id,)
    if not all(map(is_whole_number, ids)):
        raise TypeError(f"eos_id: expected a token id, several, or None, got {eos_id!r}")
    return tuple(ids)


def is_stop(tokens: Tensor, eos_id: StopIds) -> Tensor:
    """Which tokens end a completion; any shape -> the same shape, bool."""
    stops = torch.tensor(stop_ids(eos_id), dtype=torch.long, device=tokens.device)
    return torch.isin(tokens, stops)


def completion_mask(completions: Tensor, eos_id: StopIds) -> Tensor:
    """(N, T) -> (N, T) bool, True up to and including the first EOS, all True without one."""
    ends = is_stop(completions, eos_id).long()
    return ends.cumsum(dim=1) - ends == 0  # no EOS before it


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt_ids: Tensor,  # (N, P), padded on the left
    attention_mask: Tensor | None = None,  # (N, P), 1 = real token; None = no padding
    *,
    max_new_tokens: int,
    completions_per_prompt: int = 1,  # G; the rows come prompt by prompt
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: StopIds = None,  # None = every row runs to max_new_tokens
    pad_id: int = 0,  # may equal eos_id
    generator: torch.Generator | None = None,  # on the model's device; same seed, same text
    use_cache: bool = True,  # False reads the whole text again at every step: slow, the same text
) -> Rollouts:
    """Let the policy continue every prompt G times, one token at a time, all rows at once.

    Each prompt is read once. Later steps read the newest token alone, because the cache keeps the
    others, and in inference mode: a tenth faster, but a table made there can't serve in training.
    Train with temperature only: `top_k` and `top_p` change the distribution.
    """
    check_counts(max_new_tokens=max_new_tokens, completions_per_prompt=completions_per_prompt)
    device = next((p.device for p in model.parameters()), prompt_ids.device)
    prompt_mask = torch.ones_like(prompt_ids) if attention_mask is None else attention_mask
    check_prompts("attention_mask", prompt_mask, prompt_ids)
    check_sampling(temperature, top_k, top_p)
    check_room(model, prompt_mask, max_new_tokens)
    P, G, padded = prompt_ids.shape[1], completions_per_prompt, not bool(prompt_mask.all())
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    ids = pad(prompt_ids.to(device), (0, max_new_tokens), value=pad_id).repeat_interleave(G, dim=0)
    mask = pad(prompt_mask.bool().to(device), (0, max_new_tokens)).repeat_interleave(G, dim=0)
    log_probs, cache, read = None, None, 0  # read: how many tokens the cache has seen
    active = torch.arange(len(ids), device=device)  # rows that are still being written

    for end in range(P, P + max_new_tokens):
        copies = G if end == P else 1
        rows = active[::copies]  # of the copies of a prompt only the first is read
        seen = mask[rows, :end] if padded else None
        with nullcontext() if end == P else torch.inference_mode():
            output = model(
                ids[rows, read:end],
                attention_mask=seen.long() if padded else None,
                position_ids=positions_from_mask(seen)[:, read:] if padded else None,
                past_key_values=cache,
                use_cache=use_cache,
            )
        cache = output.past_key_values if use_cache else None
        read = 0 if cache is None else end
        distribution = next_token_log_probs(output.logits[:, -1], **settings)  # (rows, V)
        if copies > 1:
            distribution = distribution.repeat_interleave(copies, dim=0)
            if cache is not None:
                cache.batch_repeat_interleave(copies)

        token = torch.multinomial(distribution.exp(), 1, generator=generator)  # (active, 1)
        if log_probs is None:
            log_probs = distribution.new_zeros(len(ids), max_new_tokens)
        ids[active, end], mask[active, end] = token[:, 0].to(ids.dtype), True
        log_probs[active, end - P] = distribution.gather(1, token)[:, 0]

        going = ~is_stop(token[:, 0], eos_id)
        active = active[going]
        if len(active) == 0:
            break
        if cache is not None and not going.all():
            cache.batch_select_indices(going.nonzero()[:, 0])

    ids, mask, log_probs = ids[:, : end + 1], mask[:, : end + 1], log_probs[:, : end + 1 - P]
    return Rollouts(ids[:, :P], mask[:, :P], ids[:, P:], mask[:, P:], log_probs)


def check_room(model: nn.Module, prompt_mask: Tensor, more: int) -> None:
    """Raise ValueError if the model's context cannot hold the prompts and `more` tokens."""
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    longest = int(prompt_mask.sum(dim=1).max())
    if context is not None and longest + more > context:
        what = f"room for {more} new tokens in the context of {context}"
        raise ValueError(f"prompt_ids: expected {what}, got prompts of {longest}")
