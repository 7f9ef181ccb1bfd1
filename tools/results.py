"""Repeat the run of notebook 07, and every experiment on it, over several seeds.

    python tools/results.py                       all of it (about half an hour on two cores)
    python tools/results.py --only "KL weight 0"  one experiment again, the others as they are
    python tools/results.py --draw                the figures alone, of what is stored

Writes data/results/results.json after each experiment, and then the two figures beside it. The
table of docs/results.md is made from the same file by tools/readme.py.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt

from minigrpo.arithmetic import TRAINED_LENGTHS
from minigrpo.files import atomic_path
from minigrpo.llama import load_policy
from minigrpo.notebook import plots
from minigrpo.notebook.setup import setup
from minigrpo.objective import VARIANTS
from minigrpo.study.experiments import (
    EXPERIMENTS,
    SUMMIT,
    WARMUP,
    WARMUP_ROWS,
    Experiment,
    run,
    supervised_config,
)

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "data" / "results"
SUMMIT_NAME = next(iter(EXPERIMENTS))
SUMMIT_SEEDS, SEEDS = range(5), range(3)
GOOD = 0.9
ALGORITHMS = "The settings of six algorithms"
GROUPS = {  # of the figure
    "Task, data and reward": (
        SUMMIT_NAME,
        "a warm-up of its own for each seed",
        "one demonstration in five complete",
        "no room to think",
        "reward for the form only",
        "reward for any thought",
        "supervised, the same demonstrations",
        "supervised, right demonstrations",
    ),
    "One setting of the loss": (
        "no baseline",
        "no division by the std",
        "one ratio per sequence",
        "1 update per batch",
        "4 updates per batch",
    ),
    "KL weight (the run of notebook 07 has 0.01)": ("KL weight 0", "KL weight 0.1", "KL weight 1"),
    ALGORITHMS: tuple(VARIANTS),
}
LABELS = {  # where the field has a better word than the name under which it's stored
    "a warm-up of its own for each seed": "a base model of its own for each seed",
    "supervised, right demonstrations": "supervised, correct demonstrations",
    "no division by the std": "no division by the standard deviation",
}
SCORES = ("accuracy", "greedy", "harder", "thinking")

Results = dict[str, Any]


def settings(experiment: Experiment) -> Results:
    """All that decides how a run goes, in a form that can be compared with a stored one."""
    task = {name: getattr(value, "__name__", value) for name, value in experiment.task.items()}
    config = {
        k: list(v) if isinstance(v, tuple) else v for k, v in asdict(experiment.config).items()
    }
    shown, base = experiment.supervised, experiment.own_base
    return {
        "config": config,
        "task": task,
        "supervised": shown,
        "training": None if shown is None else asdict(supervised_config(SUMMIT.steps, 0)),
        "own_base": None if base is None else dict(base),
        "warmup": None if base is None else {**asdict(WARMUP), "rows": WARMUP_ROWS},
    }


def base_checksum() -> str:
    """Of the weights that the runs start from."""
    return sha256((ROOT / "data/tiny_llama/model.safetensors").read_bytes()).hexdigest()


def measure(name: str, seeds: range) -> Results:
    """Run one experiment with every seed; scores rounded to four digits."""
    runs = []
    for seed in seeds:
        points = list(run(EXPERIMENTS[name], load_policy(), seed=seed))
        curve = {score: [round(p.scores[score], 4) for p in points] for score in SCORES}
        curve["step"] = [p.step for p in points]
        runs.append({"seed": seed, "seconds": round(points[-1].seconds, 1), "curve": curve})
        last = "  ".join(f"{score} {curve[score][-1]:.3f}" for score in SCORES)
        print(f"{name:36} seed {seed}  {last}  {points[-1].seconds:4.0f} s", flush=True)
    return {**settings(EXPERIMENTS[name]), "runs": runs}


def load(folder: Path = FOLDER) -> Results:
    """What is stored; empty if nothing is."""
    path = folder / "results.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {"experiments": {}}


def save(results: Results, folder: Path = FOLDER) -> None:
    """Written in one piece, in the order of EXPERIMENTS, one line per run."""
    stored = results["experiments"]
    lines = []
    for name in filter(stored.get, EXPERIMENTS):
        runs = ",\n".join(f"   {json.dumps(run)}" for run in stored[name]["runs"])
        head = json.dumps({key: value for key, value in stored[name].items() if key != "runs"})
        lines.append(f' {json.dumps(name)}: {head[:-1]}, "runs": [\n{runs}]}}')
    text = f'{{"base": "{results["base"]}",\n"experiments": {{\n' + ",\n".join(lines) + "}}\n"
    assert json.loads(text)["experiments"].keys() == stored.keys()
    with atomic_path(folder / "results.json") as unfinished:
        unfinished.write_text(text, "utf-8")


# --------------------------------------------------------------------------------------------
# what docs/results.md and the figures show


def final(runs: list[Results], score: str) -> list[float]:
    """The last value of each seed."""
    return [run["curve"][score][-1] for run in runs]


def steps_to_good(run: Results) -> float:
    """The first measured step with a sampled accuracy of GOOD; inf if there is none."""
    curve = run["curve"]
    return next(
        (s for s, a in zip(curve["step"], curve["accuracy"], strict=True) if a >= GOOD),
        float("inf"),
    )


def table(results: Results) -> str:
    """One line per experiment: the mean over the seeds, and the lowest and highest of them."""
    lines = [
        f"| | seeds | sampled | greedy | 7 and 8 digits | tokens of thought | steps to {GOOD} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, experiment in results["experiments"].items():
        runs = experiment["runs"]
        cells = []
        for score, digits in zip(SCORES, (2, 2, 2, 1), strict=True):
            values = final(runs, score)
            mean, low, high = (f"{v:.{digits}f}" for v in (fmean(values), min(values), max(values)))
            cells.append(mean if low == high else f"{mean} ({low} to {high})")
        steps = median(map(steps_to_good, runs))
        cells.append("never" if steps == float("inf") else f"{steps:.0f}")
        lines.append(f"| {LABELS.get(name, name)} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summit_figure(results: Results) -> plt.Figure:
    """Accuracy and thinking length, side by side."""
    runs = results["experiments"][SUMMIT_NAME]["runs"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.2))
    lines = {
        "greedy": ("greedy", plots.BLACK, ":", 1.055),
        "accuracy": ("sampled", plots.BLUE, "-", 0.98),
        "harder": ("7 and 8 digits", plots.ORANGE, "--", 0.905),
    }
    for score, (label, color, dash, y) in lines.items():
        plots.seed_band(left, runs, score, color, dash)
        left.text(103, y, label, color=color, va="center", fontsize=9)
    plots.level(left, 0.1, "a guess")
    plots.seed_band(right, runs, "thinking", plots.GREEN)
    plots.level(right, fmean(TRAINED_LENGTHS), "one running total per digit")
    left.set(xlabel="step", ylabel="fraction of correct answers", ylim=(0, 1.08), xlim=(0, 100))
    right.set(xlabel="step", ylabel="tokens of thought", ylim=(0, 5.2), xlim=(0, 100))
    left.set_title("Its answers become correct ...")
    right.set_title("... as its thoughts grow")
    return figure


def experiments_figure(results: Results) -> plt.Figure:
    """A dot for each seed of each experiment, in groups, the best of each group first."""
    ends = {name: final(cell["runs"], "accuracy") for name, cell in results["experiments"].items()}
    heights = [len(names) + 1 for names in GROUPS.values()]
    figure, axes = plt.subplots(
        len(GROUPS), 1, sharex=True, figsize=(7, 7.6), gridspec_kw={"height_ratios": heights}
    )
    for ax, (title, names) in zip(axes, GROUPS.items(), strict=True):
        in_order = list(names)
        if title != ALGORITHMS:  # their order would look like a ranking, which this task can't give
            in_order.sort(key=lambda name: -fmean(ends[name]))
        ax.axvline(fmean(ends[SUMMIT_NAME]), color=plots.GREY, linewidth=1)
        ax.axvline(0.1, color=plots.BLACK, linewidth=1, linestyle=":")
        plots.dot_rows(ax, {LABELS.get(name, name): ends[name] for name in in_order})
        ax.set_title(title, fontsize=9.5, fontweight="bold")
        ax.spines["bottom"].set_visible(ax is axes[-1])
        ax.tick_params(axis="x", length=3 if ax is axes[-1] else 0)
    axes[-1].set(xlim=(0, 1.02), xlabel="fraction of correct answers, sampled, after the run")
    axes[0].text(0.11, 0.2, "a guess", fontsize=9)
    figure.suptitle("What breaks the run, and what makes no difference here", x=0.01, ha="left")
    return figure


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*EXPERIMENTS], help="this experiment alone")
    parser.add_argument("--draw", action="store_true", help="the figures alone, of what is stored")
    options = parser.parse_args(arguments)
    os.environ.setdefault("MINIGRPO_THREADS", "1")  # two are no faster for so small a model
    setup(seed=0)
    results = load()
    if results.get("base") != base_checksum():
        results = {"experiments": {}}  # measured on another base model
    results["base"] = base_checksum()
    for name in [] if options.draw else [options.only] if options.only else EXPERIMENTS:
        results["experiments"][name] = measure(name, SUMMIT_SEEDS if name == SUMMIT_NAME else SEEDS)
        save(results)
    if results["experiments"].keys() != EXPERIMENTS.keys():
        return  # the figures wait until there is something of everything
    for name, draw in (("summit", summit_figure), ("experiments", experiments_figure)):
        figure = draw(results)
        figure.savefig(FOLDER / f"{name}.png", dpi=160, metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
