"""Word problems in plain English, made by rule: a question, a thought and an answer as text."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.text.prompts import answer_reward, format_reward, write

NAMES = ("Ann", "Ben", "Clara", "David", "Emma", "Fred")
THINGS = ("apples", "books", "coins", "eggs", "pens", "stamps")
GAINS = ("buys", "finds", "gets")
LOSSES = ("loses", "sells", "drops")
MOST = 9  # things that anybody has


@dataclass(frozen=True)
class Problem:
    question: str
    thought: str  # the steps, such as "3 + 4 = 7, 7 - 2 = 5"
    answer: str  # a number, as text

    @property
    def prompt(self) -> str:
        """What the policy is given."""
        return f"{self.question}\n"

    @property
    def completion(self) -> str:
        """What a careful pupil writes."""
        return f"<think>{self.thought}</think>\n<answer>{self.answer}</answer>"


def is_held_out(have: int, changes: Sequence[int]) -> bool:
    """Whether problems with these numbers are kept from all training: one in five."""
    return zlib.crc32(repr((have, *changes)).encode()) % 5 == 0


def draw_problem(generator: torch.Generator, *, held_out: bool = False) -> Problem:
    """A problem of one to three steps, from one side of the split; 1 to `MOST` things at a time."""

    def pick(choices: Sequence[Any]) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    while True:
        have, changes = pick(range(1, MOST + 1)), []
        for _ in range(pick((1, 2, 3))):
            now = have + sum(changes)
            changes.append(pick([n for n in range(1, MOST + 1) if n != now]) - now)
        if is_held_out(have, changes) == held_out:
            break
    name, things, now = pick(NAMES), pick(THINGS), have
    deeds, steps = [], []
    for change in changes:
        deeds.append(f"{pick(GAINS)} {change}" if change > 0 else f"{pick(LOSSES)} {-change}")
        steps.append(f"{now} {'+' if change > 0 else '-'} {abs(change)} = {now + change}")
        now += change
    question = f"{name} has {have} {things}, {', '.join(deeds)}. How many {things} now?"
    return Problem(question, ", ".join(steps), str(now))


def draw_rows(
    n: int, generator: torch.Generator, *, held_out: bool = False
) -> list[dict[str, str]]:
    """n different rows of data for `TextProblems` and for TRL."""
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < n:
        problem = draw_problem(generator, held_out=held_out)
        rows.setdefault(problem.prompt, {"prompt": problem.prompt, "answer": problem.answer})
    return list(rows.values())


def evaluate(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict], seed: int = 5
) -> dict[str, float]:
    """How good a policy is on these problems, one sampled completion each."""
    n = len(rows)
    prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    rollouts, texts = write(policy, tokenizer, prompts, seed=seed)
    return {
        "form": sum(format_reward(prompts, texts)) / n,  # fraction in the right form
        "right": sum(answer_reward(prompts, texts, answer=answers)) / n,  # and right as well
        "length": rollouts.completion_mask.sum(dim=1).double().mean().item(),  # tokens, each
    }
