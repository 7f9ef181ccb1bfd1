"""Rewards by rule, and tasks made of them. A reward sees the completion, never the prompt.

A task has two methods, which is all that `train_grpo` asks for:

    prompts(n, generator)          -> n prompts, each a row of token ids
    reward(prompts, completions)   -> one number per completion, higher is better
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
