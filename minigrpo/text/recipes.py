"""What scripts on real data begin with: rows, a model's config, the memory that training takes.

Whatever a person can mend is raised as a ValueError (or MemoryError) of one sentence, and
`plain_errors` prints it and ends with exit code 2.
"""

from __future__ import annotations

import csv
import importlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from huggingface_hub import constants, get_session
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
)


def read_file(file: Path) -> list[dict[str, Any]]:
    """The rows of a file, by its ending."""
    if file.suffix == ".parquet":
        return importlib.import_module("pyarrow.parquet").read_table(file).to_pylist()
    with file.open(encoding="utf-8-sig", newline="") as text:  # some programs begin with a mark
        if file.suffix == ".csv":
            return [*csv.DictReader(text)]
        if file.suffix == ".json":
            return [dict(row) for row in json.load(text)]
        return [dict(json.loads(line)) for line in text if line.strip()]


ENDINGS = (".json", ".jsonl", ".csv", ".parquet")


def ask_the_hub(seconds: float = 5.0) -> None:
    """If the hub doesn't answer, its libraries are told so: they'd try six times, for 25 seconds.

    What is in their cache is found all the same.
    """
    answers = []

    def ask() -> None:
        with suppress(Exception):  # of whichever library they have for it
            answers.append(get_session().head(constants.ENDPOINT, timeout=seconds))

    asking = Thread(target=ask, daemon=True)  # to look up a name may take longer than the timeout
    asking.start()
    asking.join(seconds)
    if not answers:
        constants.HF_HUB_OFFLINE = True
        if datasets := sys.modules.get("datasets"):  # it keeps a copy
            datasets.config.HF_HUB_OFFLINE = True


def load_rows(
    name_or_file: str | Path,  # a file; or a folder or a name on the hub, for the datasets library
    split: str,  # "train" or "test"; of a file every tenth row is "test"
    columns: Sequence[str],  # those that must be there
    config: str | None = None,  # of a data set on the hub, such as "main"
) -> list[dict[str, Any]]:
    """The rows of one side of the split. ValueError: not found, unreadable, or a column missing."""
    file = Path(name_or_file).expanduser()
    of_a_file = file.suffix in ENDINGS
    try:
        if of_a_file:
            rows = [r for i, r in enumerate(read_file(file)) if (i % 10 == 9) == (split == "test")]
        elif file.is_file():
            raise ValueError(f"the ending {file.suffix!r}")
        else:
            local = file.is_dir()
            if not local:
                ask_the_hub()
            hub = importlib.import_module("datasets")
            where = str(file) if local else str(name_or_file)
            rows = hub.load_dataset(where, None if local else config, split=split).to_list()
    except ImportError as error:
        raise ValueError(f"{name_or_file}: reading it needs pip install {error.name}") from None
    except Exception as error:  # the datasets library has many of its own
        what = f"expected a {', '.join(ENDINGS)} file, or a data set that can be loaded"
        raise ValueError(f"{name_or_file}: {what}, got {first_line(error)}") from None
    for row in rows or [{}]:
        if missing := [name for name in columns if name not in row]:
            wanted, there = " and ".join(missing), ", ".join(map(str, row))
            there = there or f"no rows in {split}" + " (every tenth of a file is test)" * of_a_file
            raise ValueError(f"{name_or_file}: expected the columns {wanted}, found {there}")
        if empty := [name for name in columns if row[name] in (None, "")]:
            got = str(row)[:80]
            raise ValueError(f"{name_or_file}: expected {empty[0]} in every row, got {got}")
    return rows


def first_line(error: Exception) -> str:
    """What an error says first; libraries add paragraphs of advice."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load_config(name_or_path: str) -> tuple[PretrainedConfig, Any]:
    """Config and tokenizer of a model, before any of its weights is fetched."""
    if not Path(name_or_path).is_dir():
        ask_the_hub()
    try:
        config = AutoConfig.from_pretrained(name_or_path)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{config.model_type}, which is no causal language model")
        return config, AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        what = "expected a model's folder or its name on the hub"
        raise ValueError(f"--model {name_or_path}: {what}, got {first_line(error)}") from None


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
        "logits": 3 * 4 * rows * tokens * vocabulary,  # their gradient, and what both need
        "sampler": sampler,
    }


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a person can mend, or has stopped, ends in one sentence instead of a traceback."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # kill is a Ctrl-C
    try:
        yield
    except (ValueError, MemoryError, ImportError, OSError, SafetensorError) as error:
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
