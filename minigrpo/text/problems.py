"""Word problems in plain English, made by rule: a question, a thought and an answer as text.

A `careless` pupil writes the demonstrations that a base model is warmed up on.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.pretrain import documents_batch
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


def careless(problem: Problem, generator: torch.Generator) -> str:
    """A completion by a pupil who is careless: right in form and answer about one time in three."""
    guess = int(torch.randint(1, MOST + 1, (), generator=generator))
    knows, idle, slip = torch.rand(3, generator=generator).tolist()
    thought, answer = problem.thought, problem.answer if knows < 0.7 else str(guess)
    if idle < 0.25:  # does not think, and guesses
        thought, answer = "", str(guess)
    slips = (
        f"The answer is {answer}.",
        f"<think>{thought} <answer>{answer}</answer>",
        f"<think>{thought}</think>\n{answer}",
        f"<answer>{answer}</answer>",
    )
    if slip < 0.4:
        return slips[int(torch.randint(len(slips), (), generator=generator))]
    return replace(problem, thought=thought, answer=answer).completion


def draw_rows(
    n: int, generator: torch.Generator, *, held_out: bool = False
) -> list[dict[str, str]]:
    """n different rows of data for `TextProblems` and for TRL."""
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < n:
        problem = draw_problem(generator, held_out=held_out)
        rows.setdefault(problem.prompt, {"prompt": problem.prompt, "answer": problem.answer})
    return list(rows.values())


def warmup_batch(
    n: int, generator: torch.Generator, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, Tensor]:
    """n careless demonstrations: ids (n, S), and the loss mask (n, S), 1 on completion and EOS."""
    documents = []
    for _ in range(n):
        problem = draw_problem(generator)
        given = tokenizer(problem.prompt)["input_ids"]
        learned = tokenizer(careless(problem, generator))["input_ids"]
        documents.append((given, [*learned, tokenizer.eos_token_id]))
    return documents_batch(documents, tokenizer.pad_token_id)


def evaluate(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n: int = 128, seed: int = 5
) -> dict[str, float]:
    """How good a policy is on n held-out problems, one sampled completion each."""
    rows = draw_rows(n, torch.Generator().manual_seed(seed), held_out=True)
    prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    rollouts, texts = write(policy, tokenizer, prompts, seed=seed)
    return {
        "form": sum(format_reward(prompts, texts)) / n,  # fraction in the right form
        "right": sum(answer_reward(prompts, texts, answer=answers)) / n,  # and right as well
        "length": rollouts.completion_mask.sum(dim=1).double().mean().item(),  # tokens, each
    }
