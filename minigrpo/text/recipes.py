"""What the scripts in `recipes/` share: rows of data, memory, held-out questions, a log.

Whatever a person can mend is raised as a ValueError (or MemoryError) of one sentence, and
`plain_errors` prints it and ends with exit code 2.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from minigrpo.files import atomic_path
from minigrpo.text.prompts import RewardFunction, answer_reward, format_reward, write

READERS = {
    ".jsonl": lambda file: [
        json.loads(line) for line in file.open(encoding="utf-8") if line.strip()
    ],
    ".csv": lambda file: [*csv.DictReader(file.open(encoding="utf-8", newline=""))],
    ".parquet": lambda file: (
        importlib.import_module("pyarrow.parquet").read_table(file).to_pylist()
    ),
}
"""How a file of data is read, by its ending."""


def load_rows(
    name_or_file: str | Path,  # a file; or a folder or a name on the hub, for the datasets library
    split: str,  # "train" or "test"; of a file every tenth row is "test"
    columns: Sequence[str],  # those that must be there
    config: str | None = None,  # of a data set on the hub, such as "main"
) -> list[dict[str, Any]]:
    """The rows of one side of the split. ValueError: not found, unreadable, or a column missing."""
    file = Path(name_or_file).expanduser()
    try:
        if file.suffix in READERS:
            rows = [dict(row) for row in READERS[file.suffix](file)]
            rows = [row for i, row in enumerate(rows) if (i % 10 == 9) == (split == "test")]
        else:
            hub = importlib.import_module("datasets")
            where = str(file) if file.is_dir() else str(name_or_file)
            rows = hub.load_dataset(where, None if file.is_dir() else config, split=split).to_list()
    except ImportError as error:
        raise ValueError(f"{name_or_file}: reading it needs pip install {error.name}") from None
    except Exception as error:  # the datasets library has many of its own
        what = f"expected a {', '.join(READERS)} file, or a data set that can be loaded"
        raise ValueError(f"{name_or_file}: {what}, got {first_line(error)}") from None
    for row in rows or [{}]:
        if missing := [name for name in columns if row.get(name) is None]:
            wanted, there = " and ".join(missing), ", ".join(row) or f"no rows in {split}"
            raise ValueError(f"{name_or_file}: expected the columns {wanted}, found {there}")
    return rows


def first_line(error: Exception) -> str:
    """What an error says first; libraries add paragraphs of advice."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load_config(name_or_path: str) -> tuple[PretrainedConfig, Any]:
    """Config and tokenizer of a model, before any of its weights is fetched."""
    try:
        config = AutoConfig.from_pretrained(name_or_path)
        return config, AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        what = "expected a model's folder or its name on the hub"
        raise ValueError(f"--model {name_or_path}: {what}, got {first_line(error)}") from None


def check_chat(tokenizer: Any, instead: str) -> None:
    """Raise ValueError, with what to pass instead, if there is no chat template."""
    if not tokenizer.chat_template:
        what = "its tokenizer has no chat template, so it is no chat model"
        raise ValueError(f"--model {tokenizer.name_or_path}: {what}; pass {instead} instead")


def memory(
    config: PretrainedConfig,
    *,
    rows: int,  # in one pass
    tokens: int,  # of a completion, at most
    reference: bool = False,  # of a KL, a frozen copy
    trained: int | None = None,  # parameters that learn; None = all (LoRA: its own)
    weight_bytes: int = 4,  # of each weight: 2 where they are frozen and in bfloat16 (LoRA)
    sampler: int = 0,  # bytes that a program beside the training takes, such as vLLM
) -> dict[str, int]:
    """The least bytes that training needs, from the config alone; what layers keep comes on top.

    Float32 weights, 4 bytes each; gradients and AdamW's two averages, 12 for each that learns.
    """
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    vocabulary = config.get_text_config().vocab_size
    return {
        "weights": weight_bytes * count + 4 * (trained or 0),
        "gradients and averages": 12 * (count if trained is None else trained),
        "reference": 4 * count * reference,
        "logits": 4 * 4 * rows * tokens * vocabulary,  # and what the way back makes of them
        "sampler": sampler,
    }


def free_memory(device: str | torch.device) -> int:
    """Bytes that are free on a GPU or, for the CPU, in this machine."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):  # no Linux: all that the machine has
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(config: PretrainedConfig, *, device: str | torch.device, **sizes: Any) -> None:
    """Raise MemoryError if even the least that training needs (see `memory`) isn't free."""
    needs, free = memory(config, **sizes), free_memory(device)
    if (least := sum(needs.values())) > free:
        each = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needs.items() if size)
        raise MemoryError(
            f"training needs at least {least / 2**30:.1f} GiB ({each}), and {free / 2**30:.1f} "
            f"are free on {device}: take a smaller model, or fewer rows or tokens in one pass"
        )


def held_out(
    policy,
    tokenizer,
    rows: Sequence[Mapping[str, Any]],  # each a "prompt" and columns for the reward
    at_once: int = 32,
    reward: RewardFunction = answer_reward,  # 1 if right
    **settings,  # of `minigrpo.text.prompts.write`, such as max_new_tokens
) -> dict[str, float]:
    """Greedy answers: the fraction right, with its standard error, and the fraction in form."""
    right, form = 0.0, 0.0
    for at in range(0, len(rows), at_once):
        batch = rows[at : at + at_once]
        columns = {name: [row[name] for row in batch] for name in batch[0]}
        prompts = columns.pop("prompt")
        texts = write(policy, tokenizer, prompts, top_k=1, **settings)[1]
        right += sum(reward(prompts, texts, **columns))
        form += sum(format_reward(prompts, texts))
    n, p = len(rows), right / len(rows)
    return {"right": p, "error": math.sqrt(p * (1 - p) / n), "form": form / n, "questions": n}


class CsvLog:
    """One line per step in a file; of a run that goes on, the steps it repeats are replaced."""

    def __init__(self, path: str | Path, also: str | None = None, **settings: Any) -> None:
        self.path, self.rows = Path(path), []
        if self.path.exists():
            self.rows = READERS[".csv"](self.path)
        self.other = importlib.import_module(also) if also else None  # "trackio" or "wandb"
        if self.other:
            self.other.init(project="minigrpo", name=self.path.parent.name, config=settings)

    def add(self, step: int, **values: float | None) -> None:
        """The file is written anew, in one piece: a run that is killed leaves no half line."""
        self.rows = [row for row in self.rows if int(row["step"]) < step] + [
            {"step": step, **values}
        ]
        names = dict.fromkeys(name for row in self.rows for name in row)
        with atomic_path(self.path) as unfinished, unfinished.open("w", newline="") as file:
            table = csv.DictWriter(file, names, restval="")
            table.writeheader()
            table.writerows(self.rows)
        if self.other:
            self.other.log({k: v for k, v in values.items() if v is not None}, step=step)

    def close(self) -> None:
        if self.other:
            self.other.finish()


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a person can mend, or has stopped, ends in one sentence instead of a traceback."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # kill is a Ctrl-C
    try:
        yield
    except (ValueError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError as error:  # of a GPU
        print(f"error: take fewer rows in one pass: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)
