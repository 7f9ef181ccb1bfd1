"""The run of notebook 09 with both text models and three seeds each.

    python tools/text_runs.py          every run that is not stored yet (five minutes on one core)
    python tools/text_runs.py --again  all of them

Writes data/results/text.json after each run; notebook 09 draws what it holds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("MINIGRPO_THREADS", "1")  # two are no faster for so small a model

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.notebook.setup import setup
from minigrpo.text.models import FAMILIES, load_policy
from minigrpo.text.problems import draw_rows, evaluate
from minigrpo.text.prompts import TextProblems, stop_tokens

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "data" / "results" / "text.json"

SEEDS = (0, 1, 2)
PROBLEMS, PROBLEMS_SEED = 2000, 1  # for training
WEIGHTS = (1.0, 2.0)  # of form and answer
SCORES = ("form", "right", "length")


class Run(NamedTuple):
    """What is varied."""

    family: str
    seed: int


RUNS = [Run(family, seed) for family, seed in product(FAMILIES, SEEDS)]


def config(seed: int, stops: tuple[int, ...], pad_id: int) -> GRPOConfig:
    """The settings of one run, which are those of notebook 09."""
    return GRPOConfig(
        steps=30,
        prompts_per_step=16,
        group_size=8,
        max_new_tokens=40,
        inner_epochs=2,
        lr=1e-4,
        how="token_mean",
        kl_weight=0.01,
        evaluate_every=5,
        eos_id=stops,
        pad_id=pad_id,
        seed=seed,
    )


def task_of(tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]) -> TextProblems:
    """The problems to train on, and what is paid for."""
    rows = draw_rows(PROBLEMS, torch.Generator().manual_seed(PROBLEMS_SEED))
    return TextProblems(tokenizer, rows, weights=WEIGHTS, stops=stops)


def base(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy before the run, with its tokenizer."""
    return load_policy(ROOT / "data" / f"text_{family}", device="cpu", dtype=torch.float32)


def settings() -> dict[str, Any]:
    """All that decides how the runs go, in a form that can be compared with a stored one."""
    weights = {f: ROOT / "data" / f"text_{f}" / "model.safetensors" for f in FAMILIES}
    checksums = {f: sha256(path.read_bytes()).hexdigest() for f, path in weights.items()}
    common = asdict(config(0, (0,), 1))
    for varied in ("seed", "eos_id", "pad_id"):
        del common[varied]
    task = {"rows": [PROBLEMS, PROBLEMS_SEED], "weights": WEIGHTS}
    own = {"base": checksums, "task": task, "evaluate": evaluate.__defaults__, "config": common}
    return json.loads(json.dumps(own))


def measure(one: Run) -> dict[str, Any]:
    """One run; the scores on held-out problems before it and on the way."""
    setup(seed=0)
    policy, tokenizer = base(one.family)
    stops = stop_tokens(tokenizer, policy)
    held_out = partial(evaluate, tokenizer=tokenizer)
    curve: dict[str, list[float]] = {name: [] for name in ("step", *SCORES)}
    keep(curve, 0, held_out(policy))
    own = config(one.seed, stops, tokenizer.pad_token_id)
    for m in train_grpo(policy, task_of(tokenizer, stops), own, evaluate=held_out):
        if m.evaluation:
            keep(curve, m.step, m.evaluation)
    return {**one._asdict(), "curve": curve}


def keep(curve: dict[str, list[float]], step: int, found: Mapping[str, float]) -> None:
    """One more point, rounded to four digits."""
    curve["step"].append(step)
    for name in SCORES:
        curve[name].append(round(found[name], 4))


def stored() -> list[dict[str, Any]]:
    """The runs that were made with these settings."""
    results = json.loads(PATH.read_text("utf-8")) if PATH.is_file() else {}
    return results["runs"] if results.get("settings") == settings() else []


def name(one: Mapping[str, Any]) -> Run:
    """Which run it is."""
    return Run(one["family"], one["seed"])


def save(runs: list[dict[str, Any]]) -> None:
    """Written in one piece, in the order of RUNS, one line per run."""
    runs = sorted(runs, key=lambda one: RUNS.index(name(one)))
    lines = ",\n".join(f"  {json.dumps(one)}" for one in runs)
    part = PATH.with_name(PATH.name + ".part")
    part.write_text(f'{{"settings": {json.dumps(settings())},\n"runs": [\n{lines}]}}\n', "utf-8")
    part.replace(PATH)


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, one run after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="also what is stored")
    options = parser.parse_args(arguments)
    runs = [] if options.again else stored()
    for one in RUNS:
        if one in map(name, runs):
            continue
        result = measure(one)
        runs.append(result)
        save(runs)
        print(*one, f"right {result['curve']['right'][-1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
