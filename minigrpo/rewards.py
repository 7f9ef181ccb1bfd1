"""Rewards by rule, and tasks made of them. A reward sees the completion, never the prompt.

A task has two methods, which is all that `train_grpo` asks for:

    prompts(n, generator)          -> n prompts, each a row of token ids
    reward(prompts, completions)   -> one number per completion, higher is better
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minigrpo.checks import is_whole_number
from minigrpo.corpus import CharTokenizer


def letter_share(text: str, letter: str = "e") -> float:
    """Share of the characters of `text` that are `letter`, 0 to 1; 0 for no text.

    A share and not a count: a count could be raised by writing more.
    """
    return text.count(letter) / len(text) if text else 0.0


@dataclass(frozen=True)
class TextTask:
    """Continue one of a few texts, and be rewarded by a function of what was written.

    Attributes:
        texts: the prompts to draw from.
        score: text of one completion -> its reward.
        tokenizer: turns text into ids and back.

    Raises:
        ValueError: no texts, or an empty one (it has no next token).
    """

    texts: Sequence[str]
    score: Callable[[str], float] = letter_share
    tokenizer: CharTokenizer = field(default_factory=CharTokenizer)

    def __post_init__(self) -> None:
        if isinstance(self.texts, str) or not self.texts or not all(self.texts):
            raise ValueError(
                f"texts: expected a list of one or more texts, none empty, got {self.texts!r}"
            )

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """Draw n of the texts, all of them once before any comes twice."""
        rounds = -(-n // len(self.texts))
        order = [torch.randperm(len(self.texts), generator=generator) for _ in range(rounds)]
        return [self.tokenizer.encode(self.texts[i]) for i in torch.cat(order)[:n].tolist()]

    def reward(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> list[float]:
        """The score of each completion."""
        return [self.score(self.tokenizer.decode(completion)) for completion in completions]


# --------------------------------------------------------------------------------------------
# thinking and answering


@dataclass(frozen=True)
class Tags:
    """What separates the parts of a completion: token ids, or strings in a text.

    Attributes:
        think, end_think, answer, end_answer: the four tags.
        eos: what a completion ends with; None if its end is not written, as in a text from which
            the special tokens were left out.

    Raises:
        TypeError: ids and strings mixed.
        ValueError: two tags that are the same, or an empty one.
    """

    think: int | str
    end_think: int | str
    answer: int | str
    end_answer: int | str
    eos: int | str | None = None

    def __post_init__(self) -> None:
        if not (
            all(isinstance(tag, str) for tag in self.form) or all(map(is_whole_number, self.form))
        ):
            raise TypeError(f"tags: expected token ids or strings, all alike, got {self.form}")
        texts = [tag for tag in self.form if isinstance(tag, str)]
        if len(set(self.form)) < len(self.form) or any(t != t.strip() or not t for t in texts):
            raise ValueError(
                "tags: expected different ones, none empty or with white space at its ends, got "
                f"{self.form}"
            )

    @property
    def form(self) -> tuple[int | str, ...]:
        """The tags in the order in which they have to come."""
        tags = (self.think, self.end_think, self.answer, self.end_answer)
        return tags if self.eos is None else (*tags, self.eos)


TEXT_TAGS = Tags("<think>", "</think>", "<answer>", "</answer>")

Completion = str | Sequence[int] | Tensor
"""A text, or the token ids of one completion, without prompt and without padding."""


@dataclass(frozen=True)
class Parts:
    """What stands between the tags: token ids; of a text one string, or nothing."""

    thought: tuple[int | str, ...]
    answer: tuple[int | str, ...]


def split_parts(completion: Completion, tags: Tags = TEXT_TAGS, *, given: int = 1) -> Parts | None:
    """Cut a completion into thought and answer; None unless it keeps to the form exactly.

        thought </think> <answer> span </answer> EOS

    Each tag once, in this order, nothing between `</think>` and `<answer>`, nothing after the
    end. In a text, white space does not count there, and the parts are stripped of it.

    Args:
        completion: what the policy wrote. The prompt is never looked at, so whatever it contains,
            such as a worked example with the same tags, cannot be rewarded.
        tags: ids for ids, strings for a text.
        given: how many of the tags the prompt has written already. 1: it ends with `<think>`;
            2: with `<think> </think>`, so that there is no room to think; 0: with neither.

    Raises:
        TypeError: a text with tags that are ids, or ids with tags that are strings.
        ValueError: given is not 0, 1 or 2; ids that are not one row of whole numbers.
    """
    if not is_whole_number(given) or given not in (0, 1, 2):
        raise ValueError(f"given: expected 0, 1 or 2, got {given!r}")
    form = tags.form
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


def answer_reward(
    completion: Completion, answer: int | str, tags: Tags = TEXT_TAGS, *, given: int = 1
) -> float:
    """1 for the right answer in the right form, otherwise 0.

    The answer span must hold exactly one token, `answer`; in a text, exactly this string, white
    space around it aside ("42" is not "42.0", and not "It is 42"). completion, tags, given and
    further errors: see `split_parts`.

    Raises:
        TypeError: an answer that is not of the kind of the completion, id or string.
        ValueError: an answer that no completion could give (empty, or with a tag inside).
    """
    right = _right_answer(answer, tags)
    parts = split_parts(completion, tags, given=given)
    return float(parts is not None and parts.answer == (right,))


def format_reward(completion: Completion, tags: Tags = TEXT_TAGS, *, given: int = 1) -> float:
    """1 for the right form with a single token as the answer (in a text: any), otherwise 0.

    It says nothing about what the answer is, so a policy that is paid for the form alone will
    answer anything. Arguments and errors: see `split_parts`.
    """
    parts = split_parts(completion, tags, given=given)
    return float(parts is not None and len(parts.answer) == 1)


def think_reward(completion: Completion, tags: Tags = TEXT_TAGS, *, given: int = 1) -> float:
    """1 for the right form with a thought that is not empty, otherwise 0.

    It measures that there is a thought, in its place, before an answer; whether the thought is of
    any use it cannot tell, and a single filler word earns it. Arguments and errors: see
    `split_parts`.
    """
    parts = split_parts(completion, tags, given=given)
    return float(parts is not None and len(parts.answer) == 1 and len(parts.thought) > 0)


# --------------------------------------------------------------------------------------------
# how often is one of several right


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that of k completions of one prompt at least one is right.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) from n samples of which c are right (Chen et
    al. 2021, arXiv 2107.03374, eq. 1): of all ways to pick k of the n, the share that picks a
    right one. The tempting 1 - (1 - c/n)^k is too low on average.

    Args:
        samples: n, completions of this prompt.
        correct: c, how many of them are right.
        k: how many one may try, 1 to n.

    Raises:
        ValueError: what is no whole number, or out of range.
    """
    for name, value, low, high in (
        ("samples", samples, 1, math.inf),
        ("correct", correct, 0, samples),
        ("k", k, 1, samples),
    ):
        if not is_whole_number(value) or not low <= value <= high:
            raise ValueError(f"{name}: expected a whole number from {low} to {high}, got {value!r}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def _right_answer(answer: int | str, tags: Tags) -> int | str:
    """The answer as it will be compared."""
    if isinstance(tags.think, str):
        if not isinstance(answer, str):
            raise TypeError(f"answer: expected a string, as the tags are, got {answer!r}")
        if not answer.strip() or any(tag in answer for tag in tags.form):
            raise ValueError(f"answer: expected a text without tags, not empty, got {answer!r}")
        return answer.strip()
    if isinstance(answer, Tensor) and answer.dim() == 0:
        answer = answer.item()
    if not is_whole_number(answer):
        raise TypeError(f"answer: expected a token id, as the tags are, got {answer!r}")
    if answer in tags.form:
        raise ValueError(f"answer: expected an id that is not a tag, got {answer}")
    return answer


def _pieces(completion: Completion, tags: Tags) -> list[int | str]:
    """Token ids as they are; a text cut at its tags, without the empty pieces."""
    of_text = isinstance(tags.think, str)
    if of_text != isinstance(completion, str):
        tags_are, completion_is = ("strings", "ids") if of_text else ("ids", "a text")
        raise TypeError(
            f"completion: expected {'a text' if of_text else 'ids'}, because the tags are "
            f"{tags_are}, got {completion_is}"
        )
    if of_text:
        longest_first = sorted(tags.form, key=len, reverse=True)
        cut = re.split(f"({'|'.join(map(re.escape, longest_first))})", completion)
        return [piece.strip() for piece in cut if piece.strip()]
    ids = completion if isinstance(completion, Tensor) else torch.tensor([*completion])
    if ids.dim() != 1 or (len(ids) and ids.is_floating_point()):
        raise ValueError(
            f"completion: expected one row of token ids, got {ids.dtype}, shape {tuple(ids.shape)}"
        )
    return ids.tolist()
