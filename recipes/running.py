"""What the recipes share: rows and a model to begin with, checks, a folder of files, a way to stop.

Whatever a person can mend is raised as a ValueError (or MemoryError) of one sentence, and
`plain_errors` prints it and ends with exit code 2.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

# So that the recipes of this checkout start without an installation, and use its own modules.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from minigrpo.files import atomic_path
from minigrpo.text.models import memory
from minigrpo.text.prompts import RewardFunction, answer_reward, encode_prompt, format_reward, write

ENDINGS = (".json", ".jsonl", ".csv", ".parquet")
FREE = {"steps", "save_every", "eval_every", "log", "out", "ask"}
"""The settings that may change when a run goes on."""
AT_ONCE = 32  # held-out questions
FIVE = {  # numbers to watch, by the names that notebook 11 and TRL have for them
    "reward": "reward",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "truncated": "completions/clipped_ratio",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
}


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default not in (None, False, argparse.SUPPRESS)
        return super()._get_help_string(action) if told else action.help


def count(text: str) -> int:
    """The type of an option that is a number of something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


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
        print("interrupted: with a checkpoint, the same command goes on from it", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def first_line(error: Exception) -> str:
    """What an error says first; libraries add paragraphs of advice."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


def check_overlap(rows: list[dict], test: Sequence[Mapping[str, Any]], data: str) -> list[dict]:
    """The rows to learn from, none of which is held out too.

    ValueError: some are, in a file that was split here. Of a published split they are left out.
    """
    asked = {json.dumps(row["prompt"]) for row in test}
    apart = [row for row in rows if json.dumps(row["prompt"]) not in asked]
    if same := len(rows) - len(apart):
        what = f"{same} of {len(rows)} questions to learn from are held out, too"
        if Path(data).suffix in ENDINGS or not apart:
            raise ValueError(f"--data {data}: {what}: take out the rows that are there twice")
        print(f"{data}: {what}, so they are left out")
    return apart


def load_function(where: str) -> RewardFunction:
    """The function that `file.py:function` names. ValueError: there is none."""
    file, _, name = where.rpartition(":")
    wanted = f"--reward {where}: expected file.py:function"
    if not (file.endswith(".py") and Path(file).is_file()):
        raise ValueError(f"{wanted}, found no such file")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a reader's file may raise
        raise ValueError(f"{wanted}, got {type(error).__name__}: {first_line(error)}") from None
    if not callable(function := getattr(module, name, None)):
        raise ValueError(f"{wanted}, found no function {name!r}")
    return function


def grade(reward: RewardFunction, row: Mapping[str, Any], texts: Sequence[str]) -> list[float]:
    """The rewards of some completions of a row. ValueError: they are no numbers."""
    columns = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    try:
        rewards = reward(prompts=[row["prompt"]] * len(texts), completions=chats, **columns)
        rewards = [0.0 if value is None else float(value) for value in rewards]
        if len(rewards) == len(texts):
            return rewards
        got = f"{len(rewards)} numbers for {len(texts)} completions"
    except Exception as error:  # whatever a reader's function may raise
        got = f"{type(error).__name__}: {first_line(error)}"
    name = getattr(reward, "__name__", reward)
    raise ValueError(f"{name}: expected a number for each completion, got {got}")


def device_line(device: str) -> str:
    """Where this runs; loud if it's a CPU."""
    if torch.device(device).type == "cuda":
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        name = torch.cuda.get_device_name(device)
        return f"This runs on {device}, {name}, {free:.1f} of {total:.1f} GiB free."
    return "!!! There's no CUDA GPU, so this runs on the CPU, where a large model takes days."


def alarm(steps: Sequence[Mapping[str, Any]], right: str) -> list[str]:
    """What is wrong with a run whose log begins with these steps; `right` is a column's name."""

    def always(name: str, value: float) -> bool:
        return all(name in step and float(step[name]) == value for step in steps)

    said = {
        "in every group all rewards are equal, so nothing is learned": always(
            FIVE["frac_reward_zero_std"], 1
        ),
        "not one completion is right: grade one by hand, and ask before training": always(right, 0),
        "no completion ends: raise --tokens, and look for the token that should end one": always(
            FIVE["truncated"], 1
        ),
    }
    return [what for what, is_so in said.items() if is_so and steps]


def load_config(name_or_path: str) -> tuple[PretrainedConfig, Any]:
    """Config and tokenizer of a model, before any of its weights is fetched."""
    if not Path(name_or_path).expanduser().is_dir():
        if name_or_path[:1] in "./~":
            raise ValueError(f"--model {name_or_path}: no such folder")
        ask_the_hub()
    try:
        config = AutoConfig.from_pretrained(name_or_path)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{config.model_type}, which is no causal language model")
        return config, AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        what = "expected a model's folder or its name on the hub"
        raise ValueError(f"--model {name_or_path}: {what}, got {first_line(error)}") from None


def check_installed(package: str) -> None:
    """Raise ValueError, with the command that installs it, if there's no such package."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ValueError(f"{package} is not installed: pip install {package}")


def check_chat(tokenizer: Any) -> None:
    """Raise ValueError, with what to pass instead, if it can't write a chat."""
    name = f"--model {tokenizer.name_or_path}"
    instead = "pass --template FILE (such as recipes/plain_chat.jinja) instead"
    if not tokenizer.chat_template:
        what = "its tokenizer has no chat template, so it is no chat model"
        raise ValueError(f"{name}: {what}; {instead}")
    try:
        encode_prompt(
            tokenizer, [{"role": role, "content": "1 + 1?"} for role in ("system", "user")]
        )
    except Exception as error:  # what a template refuses, it says in its own way
        what = f"its chat template refuses a system message ({first_line(error)})"
        raise ValueError(f"{name}: {what}; {instead}") from None


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
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],  # each a "prompt" and columns for the reward
    reward: RewardFunction = answer_reward,  # 1 if right
    **settings: Any,  # of `minigrpo.text.prompts.write`, such as max_new_tokens
) -> dict[str, float]:
    """Greedy answers: the fraction right, with its standard error, and the fraction in form.

    Of a reward that isn't 0 or 1 it's the mean.
    """
    right, form = [], 0.0
    for at in range(0, len(rows), AT_ONCE):
        batch = rows[at : at + AT_ONCE]
        columns = {name: [row[name] for row in batch] for name in batch[0]}
        prompts = columns.pop("prompt")
        texts = write(policy, tokenizer, prompts, top_k=1, **settings)[1]
        chats = [[{"role": "assistant", "content": text}] for text in texts]  # as TRL has them
        given = {"prompts": prompts, "completions": texts if isinstance(prompts[0], str) else chats}
        right += [float(value or 0) for value in reward(**given, **columns)]
        form += sum(format_reward(**given))
    n, error = len(rows), statistics.pstdev(right) / math.sqrt(len(rows))
    return {"right": sum(right) / n, "error": error, "form": form / n, "questions": n}


def pass_at(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    rewards: Sequence[tuple[float, RewardFunction]],  # with their weights; the last one says right
    group: int,
    at_once: int,  # rows of completions
    **settings: Any,  # of `minigrpo.text.prompts.write`
) -> dict[str, dict[str, float]]:
    """Whether there is something to learn from, over all rows and over those of each "kind"."""
    found: dict[str, list[tuple[bool, ...]]] = {"all": []}
    step = max(1, at_once // group)
    for at in range(0, len(rows), step):
        batch = rows[at : at + step]
        prompts, settings["seed"] = [row["prompt"] for row in batch], at
        rollouts, texts = write(
            policy, tokenizer, prompts, completions_per_prompt=group, **settings
        )
        for i, row in enumerate(batch):
            mine = texts[i * group : (i + 1) * group]
            each = [[w * x for x in grade(one, row, mine)] for w, one in rewards]
            totals, right = [sum(x) for x in zip(*each)], [x >= 1 for x in each[-1]]
            group_is = (sum(right) / group, any(right), len({round(x, 9) for x in totals}) > 1)
            for kind in ("all", str(row["kind"])) if row.get("kind") else ("all",):
                found.setdefault(kind, []).append(group_is)
    return {
        kind: {
            "questions": len(groups),
            **dict(zip(("pass@1", f"pass@{group}", "differ"), map(statistics.fmean, zip(*groups)))),
        }
        for kind, groups in (("all", found.pop("all")), *sorted(found.items()))
    }


@contextmanager
def folder_of(o: argparse.Namespace, name: str) -> Iterator[str]:
    """The folder of a run: `--out`, or one in runs/; of a smoke run, one that vanishes with it."""
    with plain_errors(), tempfile.TemporaryDirectory() as temporary:
        folder = o.out or (temporary if o.smoke else f"runs/{name}")
        yield folder
        if folder == temporary:
            print("That folder was a temporary one. --out FOLDER keeps it.")


def stored(file: Path, make: Callable[[], dict]) -> dict:
    """The values in a JSON file. If there's none, `make` returns them, and they are put there."""
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    values = make()
    with atomic_path(file) as unfinished:
        unfinished.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return values


def check_same_run(o: argparse.Namespace) -> None:
    """Raise ValueError if the folder has a run with other settings; else note those of this one."""
    mine = {name: value for name, value in vars(o).items() if name not in FREE}
    before = stored(Path(o.out) / "settings.json", lambda: mine)
    for name in {**before, **mine}:
        if before.get(name) != mine.get(name):
            there = f"the run there has {name} = {before.get(name)!r}, and this one "
            there += f"{mine.get(name)!r}: take another --out, or the same settings"
            raise ValueError(f"--out {o.out}: {there}")


def ask(out: str, when: str, answers: Callable[[], dict], tell: bool = True) -> float:
    """Print what `held_out` measures. It is asked once, since the result is put in a file."""
    file = Path(out) / f"{when.replace(' ', '_')}.json"
    scores = stored(file, answers) if tell or file.exists() else answers()
    if tell:
        print(
            f"{when}: {scores['right']:.3f} +- {scores['error']:.3f} of {scores['questions']} "
            f"held-out questions right, {scores['form']:.3f} in form",
            flush=True,
        )
    return scores["right"]


def save_model(
    out: str, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> None:
    """Write `model/`, which is there as a whole or not at all."""
    made, model = Path(out) / ".model.part", Path(out) / "model"
    policy.save_pretrained(made, **settings)
    tokenizer.save_pretrained(made)
    shutil.rmtree(model, ignore_errors=True)
    made.rename(model)


class Stop:
    """Ctrl-C or kill ask a run to save the step it is at and end. The second time, it just ends."""

    asked = False

    def __enter__(self) -> Stop:
        self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def ask(self, number: int, frame: Any) -> None:
        print("finishing this step, then saving; once more stops at once", file=sys.stderr)
        self.asked = True
        signal.signal(number, self.before[number])

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class CsvLog:
    """One line per step in a file; of a run that goes on, the steps it repeats are replaced."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.rows = Path(path), []
        if self.path.exists():
            with self.path.open(encoding="utf-8", newline="") as file:
                self.rows = [*csv.DictReader(file)]

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
