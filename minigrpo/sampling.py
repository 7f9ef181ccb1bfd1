"""Sampling from a policy: many completions of many prompts at once. A row that has ended costs
nothing more, and the log-probs it was drawn with are kept: they are the old ones of the ratio."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from minigrpo.checks import check_counts, check_prompts, check_room, check_sampling, is_whole_number
from minigrpo.logprobs import next_token_log_probs, past_padding

StopIds = int | Sequence[int] | None  # what ends a completion: one token, several, or none
Reply = Callable[[int, Tensor], Sequence[int]]  # a row's number, its completion so far -> ids


@dataclass(frozen=True)
class Rollouts:
    """N completions, and the prompts they answer."""

    prompt_ids: Tensor  # (N, P), padded on the left
    prompt_mask: Tensor  # (N, P) bool, True = real token
    completions: Tensor  # (N, T), `pad_id` after the end of a row
    completion_mask: Tensor  # (N, T) bool, True up to the end, a tool's tokens too: what is read
    log_probs: Tensor  # (N, T) nats, with which each token was drawn; 0 where none was
    own: Tensor | None = None  # (N, T) bool, drawn by the policy: learned from; None = all real

    def __post_init__(self) -> None:
        if self.own is None:  # one turn: nobody else has written anything
            object.__setattr__(self, "own", self.completion_mask)

    @property
    def text(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # what scorers of completions take
        return self.prompt_ids, self.prompt_mask, self.completions, self.completion_mask

    @property
    def input_ids(self) -> Tensor:  # (N, P + T), ready to be scored
        return torch.cat([self.prompt_ids, self.completions], dim=1)

    @property
    def attention_mask(self) -> Tensor:  # (N, P + T) bool
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    def unpadded(self, values: Tensor) -> list[Tensor]:
        """(N, T), such as `completions` or `own` -> N rows of their real tokens, on the CPU."""
        return [row[real] for row, real in zip(values.cpu(), self.completion_mask.cpu())]

    def trimmed(self) -> "Rollouts":
        """Without the columns in which every row has ended."""
        T = int(self.completion_mask.sum(dim=1).max())
        written = (self.completions, self.completion_mask, self.log_probs, self.own)
        return Rollouts(self.prompt_ids, self.prompt_mask, *(values[:, :T] for values in written))

    def __getitem__(self, rows: Tensor | slice) -> "Rollouts":
        return Rollouts(*(getattr(self, f.name)[rows] for f in fields(self)))

    def to(self, device: torch.device | str) -> "Rollouts":
        return Rollouts(*(getattr(self, f.name).to(device) for f in fields(self)))


def left_pad(sequences: Sequence[Tensor], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask (N, longest) of rows that all end in the last column, where the text goes on."""
    longest = max(map(len, sequences))
    rows = [pad(torch.as_tensor(s), (longest - len(s), 0), value=pad_id) for s in sequences]
    lengths = torch.tensor([len(s) for s in sequences])
    return torch.stack(rows), torch.arange(longest) >= longest - lengths[:, None]


def stop_ids(ids: StopIds, name: str = "eos_id") -> tuple[int, ...]:
    """As a tuple. Raises TypeError for what is no token id, such as 2.0 or -1."""
    several = () if ids is None else ids if isinstance(ids, list | tuple) else (ids,)
    if not all(is_whole_number(i) and i >= 0 for i in several):
        raise TypeError(f"{name}: expected a token id, several, or None, got {ids!r}")
    return tuple(several)


def is_stop(tokens: Tensor, ids: StopIds) -> Tensor:
    """Which tokens are among the ids; any shape -> the same shape, bool."""
    stops = torch.tensor(stop_ids(ids), dtype=torch.long, device=tokens.device)
    return torch.isin(tokens, stops)


def ended(rollouts: Rollouts, eos_id: StopIds) -> Tensor:
    """(N,) bool: whether the last token of a completion is an EOS that the policy drew."""
    last = rollouts.completion_mask.sum(dim=1, keepdim=True) - 1
    return (is_stop(rollouts.completions, eos_id) & rollouts.own).gather(1, last)[:, 0]


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
    call_id: StopIds = None,  # what calls a tool; None = nobody else writes
    reply: Reply | None = None,  # what the tool writes then
) -> Rollouts:
    """Let the policy continue every prompt G times, one token at a time, all rows at once.

    Each prompt is read once; later steps read the newest token, since the cache keeps the others
    (where a model keeps none, the whole text is read at every step: slow, the same text).
    Train with temperature only: `top_k` and `top_p` change the distribution. A reply takes the
    places of what would have been drawn; it ends nothing and calls nothing.
    """
    check_counts(max_new_tokens=max_new_tokens, completions_per_prompt=completions_per_prompt)
    device = next((p.device for p in model.parameters()), prompt_ids.device)
    prompt_mask = torch.ones_like(prompt_ids) if attention_mask is None else attention_mask
    check_prompts("attention_mask", prompt_mask, prompt_ids)
    check_sampling(temperature, top_k, top_p)
    check_room(model, prompt_mask, max_new_tokens)
    if stop_ids(call_id) and (reply is None or {*stop_ids(call_id)} & {*stop_ids(eos_id)}):
        raise ValueError(f"call_id: expected a reply to it, and no end of a text, got {call_id}")
    P, G, padded = prompt_ids.shape[1], completions_per_prompt, not bool(prompt_mask.all())
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    ids = pad(prompt_ids.to(device), (0, max_new_tokens), value=pad_id).repeat_interleave(G, dim=0)
    mask = pad(prompt_mask.bool().to(device), (0, max_new_tokens)).repeat_interleave(G, dim=0)
    replies = torch.full((len(ids), max_new_tokens), -1, device=device)  # -1: the policy writes
    active = torch.arange(len(ids), device=device)  # rows that are still being written

    read = partial(_read, model, padded=padded)
    logits, cache = read(ids[::G, :P], mask[::G, :P])  # of the copies of a prompt only the first
    logits = logits.repeat_interleave(G, dim=0)  # (N, V)
    if cache is not None:
        cache.batch_repeat_interleave(G)
    log_probs = torch.zeros_like(replies, dtype=torch.promote_types(logits.dtype, torch.float32))
    for end in range(P, P + max_new_tokens):
        if end > P:  # not the first read: tensors the model keeps from it must work in training
            with torch.inference_mode():
                logits, cache = read(ids[active, :end], mask[active, :end], cache)
        distribution = next_token_log_probs(logits, **settings)  # (active, V)
        token = torch.multinomial(distribution.exp(), 1, generator=generator)  # (active, 1)
        log_probs[active, end - P] = distribution.gather(1, token)[:, 0]
        replied = replies[active, end - P]
        drawn = replied < 0  # (active,): where no reply takes the place
        token = token[:, 0].where(drawn, replied)
        ids[active, end], mask[active, end] = token.to(ids.dtype), True
        if call_id is not None and (calls := active[is_stop(token, call_id) & drawn].tolist()):
            put_replies(replies[:, end + 1 - P :], calls, ids[:, P : end + 1].cpu(), reply)
        going = ~(is_stop(token, eos_id) & drawn)
        active = active[going]
        if len(active) == 0:
            break
        if cache is not None and not going.all():
            cache.batch_select_indices(going.nonzero()[:, 0])

    T, ids, mask = end + 1 - P, ids[:, : end + 1], mask[:, : end + 1]
    own = mask[:, P:] & (replies[:, :T] < 0)
    log_probs = log_probs[:, :T].where(own, 0.0)
    return Rollouts(ids[:, :P], mask[:, :P], ids[:, P:], mask[:, P:], log_probs, own)


def _read(
    model: nn.Module, ids: Tensor, mask: Tensor, cache=None, *, padded: bool
) -> tuple[Tensor, object]:
    """Logits (n, V) for the token after ids (n, S), and the model's cache of them, or None."""
    new = ids if cache is None else ids[:, -1:]
    padding = past_padding(mask, new.shape[1]) if padded else {}
    output = model(new, past_key_values=cache, use_cache=True, **padding)
    return output.logits[:, -1], output.past_key_values


def put_replies(room: Tensor, calls: list[int], completions: Tensor, reply: Reply) -> None:
    """Write the replies to the rows that call into `room` (N, columns left), as far as they fit.

    completions: (N, columns so far), the call included.
    """
    for row in calls:
        ids = stop_ids(torch.as_tensor(reply(row, completions[row].clone())).tolist(), "reply")
        room[row, : len(ids)] = torch.tensor(ids[: room.shape[1]]).to(room)
