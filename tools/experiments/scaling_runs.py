"""Run what notebook 10 shows with seeds: two trainers side by side, and stale rollouts.

    python tools/experiments/scaling_runs.py          what is not stored yet (ten minutes)
    python tools/experiments/scaling_runs.py --again  all of it

Writes data/results/scaling.json after each run. The runs of TRL need the extra `scale`, and are
left out where it's missing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import nbformat
import store
import torch
from store import ROOT, Measure, Results, Store

from minigrpo import arithmetic
from minigrpo.notebook.setup import setup
from minigrpo.objective import group_advantages
from minigrpo.scaling.run import train_ours, train_trl
from minigrpo.scaling.trl import QUIET, problem_config, problem_rows, trl_settings
from minigrpo.text.models import load_pretrained

BASES = (ROOT / "data" / "text_llama", ROOT / "data" / "tiny_llama")
TRAINERS = {"ours": train_ours, "TRL": train_trl}
TRAINER_STEPS, STALE_STEPS = 20, 60
CORRECTIONS = ("none", "behavior", "proximal", "decoupled")  # of the notebook's `stale_loss`
SLOW = 1e-4  # a smaller learning rate, with stale rollouts only


class Run(NamedTuple):
    """What is varied; a trainer's run has no staleness and no correction."""

    what: str  # a trainer, or "stale"
    staleness: int  # steps between the policy that writes and the one that learns
    correction: str
    seed: int
    lr: float = 3e-4


RUNS = [Run(trainer, 0, "", seed) for seed, trainer in product(range(3), TRAINERS)]
RUNS += [
    Run("stale", staleness, correction, seed)
    for seed, staleness, correction in product(range(10), (0, 1, 4, 16), CORRECTIONS)
    if staleness or correction in CORRECTIONS[:2]  # the others compare two policies that are one
]
RUNS += [Run("stale", n, c, seed, SLOW) for seed, n, c in product(range(5), (4, 16), CORRECTIONS)]


# The functions that notebook 10 shows are those that are run.
PAGE = nbformat.read(ROOT / "notebooks" / "10_scaling_out.ipynb", as_version=4)
CELLS = ("ours", "stale-batch", "stale-loss", "stale-train")
SHOWN: Results = {"copy": copy, "torch": torch, "group_advantages": group_advantages}
CODE = [cell.source for cell in PAGE.cells if cell.id in CELLS]
exec("\n\n".join(CODE), SHOWN)


@cache
def trainers() -> Results:
    """The settings of the two trainers, their problems, and the version of TRL that is wanted."""
    config = problem_config(*load_pretrained(BASES[0], device="cpu"), steps=TRAINER_STEPS)
    return {
        "ours": asdict(config),
        "TRL": {**QUIET, **trl_settings(config)},
        "version": re.findall(r'"trl([^;"]+)', (ROOT / "pyproject.toml").read_text("utf-8")),
        "problems": store.of_data(problem_rows()),
    }


def settings() -> Results:
    """What decides how the runs go, beside the code of the package."""
    generator = torch.Generator().manual_seed(5)
    return {
        "bases": {base.name: store.of_folder(base) for base in BASES},
        "trainer_steps": TRAINER_STEPS,
        "trainers": trainers(),
        "stale_steps": STALE_STEPS,
        "questions": store.of_data(arithmetic.draw_questions(128, generator, held_out=True)),
        "code": store.of_code(*CODE),
    }


def measure(one: Run) -> Results:
    """One run: rewards of each batch, or the accuracy on held-out questions after every 5 steps."""
    setup(seed=0)
    torch.set_num_threads(1)
    if one.what == "stale":
        curve = SHOWN["train_stale"](
            one.staleness, one.correction, STALE_STEPS, one.seed, 5, one.lr
        )
    else:
        torch.manual_seed(one.seed)
        curve = TRAINERS[one.what](TRAINER_STEPS, seed=one.seed)["rewards"]
    return {**one._asdict(), "curve": [round(value, 4) for value in curve]}


def where_trl_is(measure: Measure, names: list[Run]) -> Iterator[Results]:
    """Two runs at a time, without those of TRL where it's missing."""
    if not find_spec("trl"):
        print("TRL is not installed, so its runs are left out.")
        names = [name for name in names if name.what != "TRL"]
    return store.in_parallel(measure, names)


STORE = Store("scaling.json", RUNS, settings)
main = partial(STORE.main, measure, over=where_trl_is)

if __name__ == "__main__":
    main()
