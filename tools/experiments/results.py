"""Repeat the run of notebook 07, and every experiment on it, over several seeds.

    python tools/experiments/results.py --only "KL weight 0"  # without --only half an hour

Writes data/results/results.json after each run, and then the two figures beside it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt
import store
from store import ROOT, Results, Seed, Store, at_the_end, final
from torch import nn

from minigrpo.arithmetic import TRAINED_LENGTHS, evaluate
from minigrpo.llama import load_policy
from minigrpo.notebook import plots
from minigrpo.objective import VARIANTS
from minigrpo.study import experiments
from minigrpo.study.experiments import EXPERIMENTS, SUMMIT, WARMUP, WARMUP_ROWS, Experiment

SUMMIT_NAME = next(iter(EXPERIMENTS))
GOOD = 0.9
ALGORITHMS = "The settings of six algorithms"
GROUPS = {  # of the figure
    "Task, data and reward": [*EXPERIMENTS][:8],
    "One setting of the loss": [*EXPERIMENTS][8:13],
    "KL weight (the run of notebook 07 has 0.01)": [*EXPERIMENTS][13:16],
    ALGORITHMS: [*VARIANTS],
}
LABELS = {  # where the field has a better word than the name under which it's stored
    "a warm-up of its own for each seed": "a base model of its own for each seed",
    "supervised, right demonstrations": "supervised, correct demonstrations",
    "no division by the std": "no division by the standard deviation",
}
SCORES = ("accuracy", "greedy", "harder", "thinking")


def settings(experiment: Experiment) -> Results:
    """All that decides how a run goes, in a form that can be compared with a stored one."""
    shown, base = experiment.supervised, experiment.own_base
    supervised = experiments.supervised_config(SUMMIT.steps, 0)
    return {
        "base": base_checksum(),
        "config": asdict(experiment.config),
        "task": names(experiment.task),
        "supervised": shown,
        "training": None if shown is None else asdict(supervised),
        "own_base": base,
        "warmup": None if base is None else {**asdict(WARMUP), "rows": WARMUP_ROWS},
    }


def names(task: Mapping[str, Any]) -> Results:
    """The settings of a task, its functions by name."""
    return {name: getattr(value, "__name__", value) for name, value in task.items()}


def base_checksum() -> str:
    """Of the weights that the runs start from."""
    return store.of_file(ROOT / "data/tiny_llama/model.safetensors")


def scores(policy: nn.Module) -> dict[str, float]:
    """On held-out questions, those that are kept."""
    found = evaluate(policy)
    return {name: found[name] for name in SCORES}


def measure(experiment: Experiment, one: Seed) -> Results:
    """One run; scores rounded to four digits."""
    curve: dict[str, list[float]] = {}
    for point in experiments.run(experiment, load_policy(), seed=one.seed):
        store.keep(curve, point.step, {name: point.scores[name] for name in SCORES})
    return {"seed": one.seed, "seconds": round(point.seconds, 1), "curve": curve}


def store_of(name: str) -> Store:
    """Of one experiment: the run itself has five seeds, the others three."""
    seeds = [Seed(seed) for seed in range(5 if name == SUMMIT_NAME else 3)]
    settings_now = partial(settings, EXPERIMENTS[name])
    return Store("results.json", seeds, settings_now, ("experiments", name))


STORES = {name: store_of(name) for name in EXPERIMENTS}
PARTS = {name: [(one, partial(measure, EXPERIMENTS[name]))] for name, one in STORES.items()}


# What docs/results.md and the figures show.


def steps_to_good(run: Results) -> float:
    """The first measured step with a sampled accuracy of GOOD; inf if there is none."""
    points = zip(run["curve"]["step"], run["curve"]["accuracy"], strict=True)
    return next((step for step, accuracy in points if accuracy >= GOOD), float("inf"))


def when_good(runs: list[Results]) -> str:
    """The median of `steps_to_good`, and in brackets the fewest and most."""
    steps = sorted(map(steps_to_good, runs))
    ends = "" if steps[0] == steps[-1] else f" ({steps[0]:.0f} to {steps[-1]:.0f})"
    return "never" if median(steps) == float("inf") else f"{median(steps):.0f}{ends}"


COLUMNS = {
    "sampled": at_the_end("accuracy", 2),
    "greedy": at_the_end("greedy", 2),
    "7 and 8 digits": at_the_end("harder", 2),
    "tokens of thought": at_the_end("thinking", 1),
    f"steps to {GOOD}": when_good,
}


def table(names: Iterable[str]) -> str:
    """One line for each of these experiments."""
    stored = store.load("results.json")["experiments"]
    return store.table(COLUMNS, ((LABELS.get(name, name), stored[name]["runs"]) for name in names))


def summit_figure(results: Results) -> plt.Figure:
    """Accuracy and thinking length, side by side."""
    runs = results["experiments"][SUMMIT_NAME]["runs"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.2))
    curves = {
        "greedy": ("greedy", plots.BLACK, ":", 1.055),
        "accuracy": ("sampled", plots.BLUE, "-", 0.98),
        "harder": ("7 and 8 digits", plots.ORANGE, "--", 0.905),
    }
    for score, (label, color, dash, y) in curves.items():
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
    sizes = {"figsize": (7, 7.6), "gridspec_kw": {"height_ratios": heights}}
    figure, axes = plt.subplots(len(GROUPS), 1, sharex=True, **sizes)
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
    """Measure what is missing, and draw when there is something of everything."""
    store.command(PARTS, arguments)
    if all(one.stored() for one in STORES.values()):
        for name, draw in (("summit", summit_figure), ("experiments", experiments_figure)):
            figure = draw(store.load("results.json"))
            figure.savefig(store.FOLDER / f"{name}.png", dpi=160, metadata={"Software": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
