"""Rewards by rule, and a task made of them. A reward sees the completion, never the prompt."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from minigrpo.corpus import CharTokenizer

Token = int | str  # an id, or a piece of text
Completion = str | Sequence[int] | Tensor  # of one row, without prompt and padding


def letter_share(text: str, letter: str = "e") -> float:
    """Fraction of the characters that are `letter`. A count could be raised by writing more."""
    return text.count(letter) / len(text) if text else 0.0


@dataclass(frozen=True)
class TextTask:
    """Continue one of a few texts, and be rewarded by a function of what was written."""

    texts: Sequence[str]  # the prompts to draw from
    grade: Callable[[str], float] = letter_share  # text of one completion -> its reward
    tokenizer: CharTokenizer = field(default_factory=CharTokenizer)

    def __post_init__(self) -> None:
        if isinstance(self.texts, str) or not self.texts or not all(self.texts):
            raise ValueError(f"texts: expected a list of texts, none empty, got {self.texts!r}")

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """Draw n of the texts, all of them once before any comes twice."""
        rounds = -(-n // len(self.texts))
        order = [torch.randperm(len(self.texts), generator=generator) for _ in range(rounds)]
        return [self.tokenizer.encode(self.texts[i]) for i in torch.cat(order)[:n].tolist()]

    def reward(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> list[float]:
        return [self.grade(self.tokenizer.decode(completion)) for completion in completions]


class Tags(NamedTuple):
    """What separates the parts of a completion: token ids, or strings in a text."""

    think: Token
    end_think: Token
    answer: Token
    end_answer: Token
    eos: Token | None = None  # None if the end is not written, as in a decoded text

    @property
    def form(self) -> tuple[Token, ...]:  # in the order in which they have to come
        return tuple(tag for tag in self if tag is not None)


TEXT_TAGS = Tags("<think>", "</think>", "<answer>", "</answer>")


class Parts(NamedTuple):
    thought: tuple[Token, ...]  # what stands between the tags: ids; of a text one string or none
    answer: tuple[Token, ...]


def split_parts(completion: Completion, tags: Tags = TEXT_TAGS, *, given: int = 1) -> Parts | None:
    """Cut a completion into thought and answer; None unless it keeps to the form exactly.

    The form is `thought </think> <answer> span </answer> EOS`: each tag once, in this order, and
    nothing elsewhere. The prompt has written as many tags as are `given`: 1 for `<think>`, or 2.
    """
    form = tags.form
    if given not in (0, 1, 2) or len({*form}) < len(form) or len({*map(type, form)}) > 1:
        what = "different tags, all ids or all text, and given 0, 1 or 2"
        raise ValueError(f"expected {what}, got {form} and {given}")
    # With the given tags put back in front, one rule fits all three cases.
    pieces = [*form[:given], *_pieces(completion, tags)]
    at = [i for i, piece in enumerate(pieces) if piece in form]
    if tuple(pieces[i] for i in at) != form:
        return None  # a tag that is missing, repeated or out of order
    think, end_think, answer, end_answer, *_ = at
    before, between, after = think, answer - end_think - 1, len(pieces) - end_answer - 1
    if before or between or after != len(form) - 4:
        return None  # something outside the parts; after them stands the EOS, if there is one
    return Parts(tuple(pieces[1:end_think]), tuple(pieces[answer + 1 : end_answer]))


def _pieces(completion: Completion, tags: Tags, name: str = "completion") -> list[Token]:
    """Token ids as they are; a text cut at its tags, without the empty pieces."""
    if isinstance(completion, str) != isinstance(tags.think, str):
        raise TypeError(f"{name}: expected ids or text as the tags are, got {completion!r}")
    if isinstance(completion, str):
        longest_first = sorted(tags.form, key=len, reverse=True)
        cut = re.split(f"({'|'.join(map(re.escape, longest_first))})", completion)
        return [p if p in tags.form else p.strip() for p in cut if p.strip()]
    ids = completion if isinstance(completion, Tensor) else torch.tensor([*completion])
    if ids.dim() != 1:
        raise ValueError(f"completion: expected one row of ids, got shape {tuple(ids.shape)}")
    return ids.tolist()


def answer_reward(
    completion: Completion, answer: Token, tags: Tags = TEXT_TAGS, *, given: int = 1
) -> float:
    """1 for exactly this answer in the right form, else 0: "42" is not "42.0" nor "It is 42"."""
    right = _pieces(answer if isinstance(answer, str) else [answer], tags, "answer")
    if len(right) != 1 or right[0] in tags.form:  # nobody could give it
        raise ValueError(f"answer: expected one that can stand between the tags, got {answer!r}")
    parts = split_parts(completion, tags, given=given)
    return float(parts is not None and parts.answer == (*right,))


def format_reward(completion: Completion, tags: Tags = TEXT_TAGS, *, given: int = 1) -> float:
    """1 for the right form with one token (in a text: anything) as the answer, otherwise 0."""
    parts = split_parts(completion, tags, given=given)
    return float(parts is not None and len(parts.answer) == 1)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that of k completions of one prompt at least one is right.

    1 - C(n - c, k) / C(n, k), unbiased for c right of n (Chen et al. 2021, arXiv 2107.03374).
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"expected 0 to {samples} correct, and k from 1, got {correct} and {k}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
