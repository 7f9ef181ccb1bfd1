"""One-step word problems for a real model, asked after a few that are solved: "few-shot".

A finite set of data, in which every fifth pair of numbers is held out. The rewards are TRL's kind
of functions, see `prompts`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.text.problems import NAMES, THINGS
from minigrpo.text.prompts import Text, TextProblems, stop_tokens, text_of

ASK = "{name} has {have} {things} and {deed}. How many {things} does {name} have now?"
DEEDS = {"gets": "gets {n} more", "loses": "loses {n}"}
SOLVED = {"gets": "{have} + {n} = {now}", "loses": "{have} - {n} = {now}"}
SHOTS = {  # the problems that are shown solved: kind, name, things, have, n
    "one loss": (
        ("gets", "Ben", "books", 4, 2),
        ("loses", "Emma", "coins", 9, 1),
        ("gets", "Fred", "pens", 9, 9),
    ),
    "no loss": (
        ("gets", "Ben", "books", 4, 2),
        ("gets", "Emma", "coins", 9, 1),
        ("gets", "Fred", "pens", 9, 9),
    ),
}


def problem(kind: str, name: str, things: str, have: int, n: int) -> dict[str, str]:
    """A question, its kind, the thought and the answer of a careful pupil."""
    now = have + n if kind == "gets" else have - n
    deed = DEEDS[kind].format(n=n)
    question = ASK.format(name=name, have=have, things=things, deed=deed)
    thought = SOLVED[kind].format(have=have, n=n, now=now)
    return {"question": question, "kind": kind, "thought": thought, "answer": str(now)}


def is_held_out(kind: str, have: int, n: int) -> bool:
    """Whether problems with these numbers are kept from all training: one pair in five.

    A sum is held out with its reverse: 6 + 3 beside 3 + 6 in training would be a leak.
    """
    pair = f"{max(have, n)} {min(have, n)}"  # what is lost is always less
    return zlib.crc32(f"{kind} {pair} once more".encode()) % 5 == 0


def all_problems(*, held_out: bool) -> list[dict[str, str]]:
    """Every problem of one side of the split; as many gains as losses, in a fixed order."""
    by_kind: dict[str, list[dict[str, str]]] = {"gets": [], "loses": []}
    numbers = product(range(2, 10), range(1, 10))
    for (have, n), name, things, kind in product(numbers, NAMES, THINGS, by_kind):
        if is_held_out(kind, have, n) == held_out and (kind == "gets" or n < have):
            by_kind[kind].append(problem(kind, name, things, have, n))
    generator = torch.Generator().manual_seed(0)
    fewest = min(map(len, by_kind.values()))
    problems = [
        alike[i]
        for alike in by_kind.values()
        for i in torch.randperm(len(alike), generator=generator)[:fewest].tolist()
    ]
    return [problems[i] for i in torch.randperm(len(problems), generator=generator).tolist()]


def asked(question: str, shots: str = "one loss") -> str:
    """The prompt: three solved problems, then the question."""
    lines = []
    for shot in SHOTS[shots]:
        solved = problem(*shot)
        lines.append(f"Q: {solved['question']}")
        lines.append(f"A: <think>{solved['thought']}</think><answer>{solved['answer']}</answer>")
    return "\n".join([*lines, f"Q: {question}", "A:"])


def rows(shots: str = "one loss", *, held_out: bool) -> list[dict[str, str]]:
    """The data set: prompt, kind and answer of each problem."""
    problems = all_problems(held_out=held_out)
    return [{"prompt": asked(row["question"], shots), **row} for row in problems]


def line_ends(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end an answer of one line: whatever holds a line break, and the EOS tokens."""
    ids = range(len(tokenizer))
    breaks = [i for i, text in zip(ids, tokenizer.batch_decode([[i] for i in ids])) if "\n" in text]
    return tuple(dict.fromkeys([*stop_tokens(tokenizer, policy), *breaks]))


def tags_reward(
    prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
) -> list[float]:
    """A soft form: a quarter for each of the four tags that occurs exactly once."""
    written = [re.findall(r"</?think>|</?answer>", text_of(text)) for text in completions]
    return [sum(0.25 for tag in set(tags) if tags.count(tag) == 1) for tags in written]


@dataclass(frozen=True)
class Epochs(TextProblems):
    """The same task, which goes through its rows in a new order each epoch and repeats none."""

    _left: list[list[int]] = field(default_factory=list, init=False, repr=False, compare=False)

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """The next n; the rest of an epoch that is no whole batch is left out."""
        ids = list(self._by_ids)
        if len(ids) < n:
            raise ValueError(f"rows: expected {n} different ones or more, got {len(ids)}")
        if not self._left or len(self._left[0]) != n:
            options = {"shuffle": True, "drop_last": True, "collate_fn": list}
            self._left[:] = DataLoader(range(len(ids)), n, generator=generator, **options)
        return [torch.tensor(ids[i]) for i in self._left.pop(0)]
