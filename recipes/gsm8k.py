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


def gsm8k_rows(data: str | Path, split: str) -> list[dict]:
    """Rows of "prompt", a chat, and "answer"; of a file every tenth row is "test".

    GSM8K's own answers are texts that end in `#### 72`. ValueError: a column or that is missing.
    """
    system, rows = {"role": "system", "content": SYSTEM}, []
    for row in load_rows(data, split, ("question", "answer"), config="main"):
        _, marks, answer = str(row["answer"]).rpartition("####")
        if not (marks and answer.strip()):
            end = str(row["answer"])[-20:]
            raise ValueError(f"{data}: expected answers that end in '#### number', got {end!r}")
        prompt = [system, {"role": "user", "content": str(row["question"])}]
        rows.append({"prompt": prompt, "answer": answer.strip()})
    return rows


def like_gsm8k(folder: str | Path, n: int = 80) -> str:
    """Write a file like GSM8K's, of n easy questions made here; returns where it is."""
    generator = torch.Generator().manual_seed(0)
    problems = [draw_problem(generator) for _ in range(n)]
    rows = [{"question": p.question, "answer": f"{p.thought}\n#### {p.answer}"} for p in problems]
    path = Path(folder) / "like_gsm8k.jsonl"
    with atomic_path(path) as file:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
