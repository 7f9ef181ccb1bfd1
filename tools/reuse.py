"""Sweep the updates per batch, the length of the texts and the level of the ratio, for notebook 03.

    python tools/reuse.py          every run that is not stored yet (over an hour on two cores)
    python tools/reuse.py --again  all of them

Everything else is equal: the starting weights, the learning rate, and how many texts are sampled.
Writes data/results/reuse.json after each run; notebook 03 draws what it holds.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("MINIGRPO_THREADS", "1")  # a run has one core, and the next one another

from torch import nn

from minigrpo.files import atomic_path
from minigrpo.gpt import load_gpt
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.notebook.setup import setup
from minigrpo.objective import VARIANTS
from minigrpo.rewards import TextTask

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "data" / "results" / "reuse.json"
BASE = ROOT / "data" / "char_gpt.safetensors"

PROMPTS = ("ROMEO:", "JULIET:", "HENRY:", "My lord", "O, ", "To be, or")
NO_CLIP = (1.0, 1e9)  # a range that no ratio leaves

ARMS: dict[str, dict[str, Any]] = {
    "product": {"level": "sequence"},
    "geometric": {"level": "geometric", "clip": VARIANTS["gspo"]["clip"]},
    "token": {"level": "token"},
    "token, no clip": {"level": "token", "clip": NO_CLIP},
}
"""One ratio per text, its geometric mean with GSPO's own range, and one ratio per token."""

EPOCHS = (1, 2, 4, 8)  # updates on each batch
RATE, OTHER_RATES = 3e-4, (1e-4, 1e-3)  # learning rates; the others with short texts only
LENGTHS = (24, 128)  # characters per text
SEEDS = (0, 1, 2)
STEPS = 16  # batches of 4 prompts x 16 texts: 1,024 texts in all


class Run(NamedTuple):
    """What is varied."""

    arm: str
    length: int
    epochs: int
    lr: float
    seed: int


RUNS = [Run(a, t, k, RATE, s) for t, s, k, a in product(LENGTHS, SEEDS, EPOCHS, ARMS)] + [
    Run(a, LENGTHS[0], k, lr, s) for lr, s, k, a in product(OTHER_RATES, SEEDS, EPOCHS, ARMS)
]


def config(cell: Run) -> GRPOConfig:
    """The settings of one run: those of notebook 03, but for what is varied."""
    return GRPOConfig(
        steps=STEPS,
        prompts_per_step=4,
        group_size=16,
        max_new_tokens=cell.length,
        inner_epochs=cell.epochs,
        lr=cell.lr,
        seed=cell.seed,
        **ARMS[cell.arm],
    )


def run(base: nn.Module, cell: Run) -> Iterator[StepMetrics]:
    """Train a copy of `base` to write the letter e; yields what each step saw."""
    yield from train_grpo(copy.deepcopy(base), TextTask(PROMPTS), config(cell))


def settings() -> dict[str, Any]:
    """All that decides how the runs go, in a form that can be compared with a stored one."""
    common = asdict(config(RUNS[0]))
    for varied in ("level", "clip", "max_new_tokens", "inner_epochs", "lr", "seed"):
        del common[varied]
    checksum = sha256(BASE.read_bytes()).hexdigest()
    return json.loads(json.dumps({"base": checksum, "arms": ARMS, "config": common}))


def measure(cell: Run) -> dict[str, Any]:
    """One run; its curves rounded to four digits."""
    setup(seed=0)
    steps = list(run(load_gpt(BASE).eval(), cell))
    return {
        **cell._asdict(),
        "seconds": round(sum(m.seconds for m in steps), 1),
        "reward": [round(m.reward, 4) for m in steps],
        "clipped": [round(m.clip_low + m.clip_high, 4) for m in steps],  # mean over the updates
    }


def stored() -> list[dict[str, Any]]:
    """The runs that were made with these settings."""
    results = json.loads(PATH.read_text("utf-8")) if PATH.is_file() else {}
    return results["runs"] if results.get("settings") == settings() else []


def name(run: dict[str, Any]) -> Run:
    """Which run it is."""
    return Run(*(run[field] for field in Run._fields))


def save(runs: list[dict[str, Any]]) -> None:
    """Written in one piece, in the order of RUNS, one line per run."""
    runs = sorted(runs, key=lambda run: RUNS.index(name(run)))
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    text = f'{{"settings": {json.dumps(settings())},\n"runs": [\n{lines}]}}\n'
    with atomic_path(PATH) as unfinished:
        unfinished.write_text(text, "utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, with as many runs at a time as there are cores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="also what is stored")
    options = parser.parse_args(arguments)
    runs = [] if options.again else stored()
    missing = [cell for cell in RUNS if cell not in map(name, runs)]
    with multiprocessing.get_context("spawn").Pool(min(2, os.cpu_count() or 1)) as pool:
        for result in pool.imap_unordered(measure, missing):
            runs.append(result)
            save(runs)
            print(*name(result), f"reward {result['reward'][-1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
