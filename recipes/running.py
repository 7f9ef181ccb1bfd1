"""What a run of a recipe asks before it loads a weight, what it keeps in its folder, how it stops.

The files beside this one import it. Each raises a ValueError (or MemoryError) of one sentence for
whatever a person can mend.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

# So that the recipes of this checkout start without an installation, and use its own modules.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from minigrpo.files import atomic_path
from minigrpo.text.prompts import RewardFunction, answer_reward, encode_prompt, format_reward, write
from minigrpo.text.recipes import first_line, memory, plain_errors

FREE = {"steps", "save_every", "log", "out"}
"""The settings that may change when a run goes on."""


def count(text: str) -> int:
    """The type of an option that is a number of something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def check_installed(package: str) -> None:
    """Raise ValueError, with the command that installs it, if there's no such package."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ValueError(f"{package} is not installed: pip install {package}")


def check_chat(tokenizer: Any, instead: str) -> None:
    """Raise ValueError, with what to pass instead, if it can't write a chat."""
    name = f"--model {tokenizer.name_or_path}"
    if not tokenizer.chat_template:
        what = "its tokenizer has no chat template, so it is no chat model"
        raise ValueError(f"{name}: {what}; pass {instead} instead")
    try:
        encode_prompt(
            tokenizer, [{"role": role, "content": "1 + 1?"} for role in ("system", "user")]
        )
    except Exception as error:  # what a template refuses, it says in its own way
        what = f"its chat template refuses a system message ({first_line(error)})"
        raise ValueError(f"{name}: {what}; pass {instead} instead") from None


def check_room(
    config: PretrainedConfig, tokenizer: Any, rows: Sequence[Mapping[str, Any]], tokens: int
) -> int:
    """Tokens of the longest prompt and completion. ValueError: the model has no room for them."""
    prompt = max(len(encode_prompt(tokenizer, row["prompt"])) for row in rows)
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    if room and prompt + tokens > room:
        raise ValueError(
            f"--tokens {tokens}: the longest prompt has {prompt}, and {tokenizer.name_or_path} has "
            f"room for {room} in all"
        )
    return prompt + tokens


def free_memory(device: str | torch.device) -> int:
    """Bytes that are free on a GPU or, for the CPU, in this machine."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):  # no Linux: all that the machine has
        if not hasattr(os, "sysconf"):  # Windows doesn't say
            return sys.maxsize
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # a container may have less; "max" is no limit
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


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


@contextmanager
def folder_of(o: argparse.Namespace, name: str) -> Iterator[str]:
    """The folder of a run: `--out`, or one in runs/; of a smoke run, one that vanishes with it."""
    with plain_errors(), tempfile.TemporaryDirectory() as temporary:
        given = o.out
        yield given or (temporary if o.smoke else f"runs/{name}")
        if o.smoke and not given:
            print("That folder was a temporary one. --out FOLDER keeps it.")


def kept(file: Path, make: Callable[[], dict]) -> dict:
    """The values in a JSON file. If there's none, those that `make` returns, kept there."""
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    values = make()
    with atomic_path(file) as unfinished:
        unfinished.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return values


def check_same_run(o: argparse.Namespace) -> None:
    """Raise ValueError if the folder has a run with other settings; else note those of this one."""
    mine = {name: value for name, value in vars(o).items() if name not in FREE}
    before = kept(Path(o.out) / "settings.json", lambda: mine)
    for name in {**before, **mine}:
        if before.get(name) != mine.get(name):
            there = f"the run there has {name} = {before.get(name)!r}, and this one "
            there += f"{mine.get(name)!r}: take another --out, or the same settings"
            raise ValueError(f"--out {o.out}: {there}")


def ask(out: str, when: str, answers: Callable[[], dict]) -> None:
    """Print what `held_out` finds. It is asked once, since the result is kept in a file."""
    found = kept(Path(out) / f"{when.replace(' ', '_')}.json", answers)
    print(
        f"{when}: {found['right']:.3f} +- {found['error']:.3f} of {found['questions']} "
        f"held-out questions right, {found['form']:.3f} in form",
        flush=True,
    )


def save_model(out: str, policy, tokenizer) -> None:
    """Write `model/`, which is there as a whole or not at all."""
    made, model = Path(out) / ".model.part", Path(out) / "model"
    policy.save_pretrained(made)
    tokenizer.save_pretrained(made)
    shutil.rmtree(model, ignore_errors=True)
    made.rename(model)


class Stop:
    """Ctrl-C or kill ask a run to save the step it is at and end. The second time, it just ends."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.asked, self.then = False, then

    def __enter__(self) -> Stop:
        self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def ask(self, number: int, frame: Any) -> None:
        print("finishing this step, then saving; once more stops at once", file=sys.stderr)
        self.asked = True
        self.then()
        signal.signal(number, self.before[number])

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class CsvLog:
    """One line per step in a file; of a run that goes on, the steps it repeats are replaced."""

    def __init__(self, path: str | Path, also: str | None = None, **settings: Any) -> None:
        self.path, self.rows = Path(path), []
        if self.path.exists():
            with self.path.open(encoding="utf-8", newline="") as file:
                self.rows = [*csv.DictReader(file)]
        self.other = importlib.import_module(also) if also else None  # "trackio" or "wandb"
        if self.other:
            self.other.init(project="minigrpo", name=self.path.parent.name, config=settings)

    @property
    def last(self) -> int:
        """The last step in it."""
        return int(self.rows[-1]["step"]) if self.rows else 0

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
