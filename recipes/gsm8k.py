"""GSM8K, grade-school word problems: the prompt, and the number behind `####` as the answer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from running import load_rows

from minigrpo.files import atomic_path
from minigrpo.text.problems import draw_problem

HUB = "openai/gsm8k"
SYSTEM = (
    "Think step by step. Answer in exactly this form: "
    "<think>your steps</think><answer>the number</answer>"
)


def gsm8k_rows(data: str | Path, split: str, marks: bool = True) -> list[dict]:
    """Rows of "prompt", a chat, "answer", and a "kind"; of a file every tenth row is "test".

    GSM8K's own answers are texts that end in `#### 72`, a line for each step before it: that's the
    kind, unless there's a column of this name. Without `marks` (a reward of one's own) an answer
    may be any text, and the other columns are kept. ValueError: a column or a mark is missing.
    """
    system, rows = {"role": "system", "content": SYSTEM}, []
    for row in load_rows(data, split, ("question", "answer"), config="main"):
        steps, mark, answer = str(row["answer"]).rpartition("####")
        if marks and not (mark and answer.strip()):
            end = str(row["answer"])[-20:]
            raise ValueError(f"{data}: expected answers that end in '#### number', got {end!r}")
        prompt = [system, {"role": "user", "content": str(row["question"])}]
        kind = row.get("kind") or (steps_in(steps) if mark else None)
        others = {**({} if marks else row), **({"kind": kind} if kind else {})}
        rows.append({**others, "prompt": prompt, "answer": answer.strip()})
    return rows


def steps_in(text: str) -> str:
    """A line is a step."""
    n = len(text.strip().splitlines())
    return f"{n} step{'s' * (n != 1)}"


def like_gsm8k(folder: str | Path, n: int = 80) -> str:
    """Write a file like GSM8K's, of n easy questions made here; returns where it is."""
    generator = torch.Generator().manual_seed(0)
    problems = [draw_problem(generator) for _ in range(n)]
    rows = [
        {
            "question": p.question,
            "answer": "\n#### ".join((p.thought.replace(", ", "\n"), p.answer)),
        }
        for p in problems
    ]
    path = Path(folder) / "like_gsm8k.jsonl"
    with atomic_path(path) as file:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
