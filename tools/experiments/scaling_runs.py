"""Run what notebook 10 shows with seeds: two trainers side by side, and stale rollouts.

Writes data/results/scaling.json after each run, half an hour in all. The runs of TRL need the extra
`scale`, and are left out where it's missing.
"""

import collections
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
from minigrpo.exercises.reader import find
from minigrpo.grpo import rollout
from minigrpo.llama import load_policy
from minigrpo.logprobs import token_log_probs
from minigrpo.notebook.setup import setup
from minigrpo.objective import group_advantages
from minigrpo.scaling.run import train_ours, train_trl
from minigrpo.scaling.trl import QUIET, problem_config, problem_rows, trl_settings
from minigrpo.study.experiments import SUMMIT
from minigrpo.text.models import load_pretrained

BASES = (ROOT / "data" / "text_llama", ROOT / "data" / "tiny_llama")
TRAINERS = {"ours": train_ours, "TRL": train_trl}
TRAINER_STEPS, OFF_POLICY_STEPS, LR = 20, 60, 3e-4
CORRECTIONS = ("uncorrected", "one_ratio", "per_token", "per_completion")  # losses of the notebook


class Run(NamedTuple):
    """What is varied; a trainer's run has no age and no correction."""

    what: str  # a trainer, "stale", or "slow", with a third of the learning rate
    age: int  # steps between the policy that writes and the one that learns
    correction: str
    seed: int


RUNS = [Run(trainer, 0, "", seed) for seed, trainer in product(range(3), TRAINERS)]
RUNS += [Run("stale", 0, "uncorrected", seed) for seed in range(10)]
RUNS += [Run("stale", n, c, s) for s, n, c in product(range(10), (1, 4, 16), CORRECTIONS)]
RUNS += [Run("slow", 16, c, seed) for seed, c in product(range(5), CORRECTIONS)]


# The functions that notebook 10 shows are those that are run.
PAGE = nbformat.read(ROOT / "notebooks" / "10_scaling_out.ipynb", as_version=4)
CELLS = ("write", "losses", "train", "per-completion")
SHOWN: Results = {m.__name__.split(".")[-1]: m for m in (collections, copy, torch, arithmetic)}
SHOWN |= {f.__name__: f for f in (group_advantages, load_policy, rollout, token_log_probs)}
SHOWN |= {f.__name__: f for f in (find("10.1").reference, find("10.2").reference)}
SHOWN |= {"SUMMIT": SUMMIT, "task": arithmetic.Arithmetic()}
SHOWN["asked"] = arithmetic.draw_questions(128, torch.Generator().manual_seed(5), held_out=True)
SOURCES = {cell.id: cell.source for cell in PAGE.cells}
CODE = [SOURCES[name] for name in CELLS]
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
    return {
        "bases": {base.name: store.of_folder(base) for base in BASES},
        "trainer_steps": TRAINER_STEPS,
        "trainers": trainers(),
        "off_policy": {**asdict(SUMMIT), "steps": OFF_POLICY_STEPS, "lr": LR},
        "questions": store.of_data(SHOWN["asked"]),
        "code": store.of_code(*CODE),
    }


def measure(one: Run) -> Results:
    """One run: rewards of each batch, or the accuracy on held-out questions after every 5 steps."""
    setup(seed=0)
    torch.set_num_threads(1)
    if one.what in TRAINERS:
        torch.manual_seed(one.seed)
        curve = TRAINERS[one.what](TRAINER_STEPS, seed=one.seed)["rewards"]
    else:
        lr = LR / 3 if one.what == "slow" else LR
        how = {"age": one.age, "seed": one.seed, "steps": OFF_POLICY_STEPS, "lr": lr}
        curve = SHOWN["train"](SHOWN[one.correction], **how)
    return {**one._asdict(), "curve": [round(value, 4) for value in curve]}


def where_trl_is(measure: Measure, names: list[Run]) -> Iterator[Results]:
    """Two runs at a time, without those of TRL where it's missing."""
    if not find_spec("trl"):
        print("TRL is not installed, so its runs are left out.")
        names = [name for name in names if name.what != "TRL"]
    return store.in_parallel(measure, names)


STORE = Store("scaling.json", RUNS, settings)
main = partial(store.command, {"scaling": [(STORE, measure)]}, over=where_trl_is)

if __name__ == "__main__":
    main()
