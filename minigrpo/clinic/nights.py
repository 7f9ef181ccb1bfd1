"""The night shift: runs of which one log, chart or transcript has come in, without a healthy twin.

`night.md` says what they have, and data/results/night.json what is shown of them (the command
tools/experiments/text_runs.py measures them).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

from minigrpo.clinic.charts import Readings, side_by_side
from minigrpo.clinic.diagnosis import named
from minigrpo.clinic.patients import notes_by_diagnosis, records
from minigrpo.files import data_folder
from minigrpo.notebook import plots, progress

EXAMPLE, PARTS = "eight tokens", 7  # the arrival with place 0, and columns of a log


@dataclass(frozen=True, eq=False, repr=False)
class Arrival:
    """A run that came in at night. One thing is wrong with it, or two, or nothing."""

    place: int
    _name: str

    def __repr__(self) -> str:
        return f"{self._title} arrival.show() shows what came in."

    @property
    def _title(self) -> str:
        return f"Arrival {self.place} of {len(stored()) - 1}."

    def show(self) -> None:
        """What came in: a log, a chart, or completions of the last batch."""
        run, about = stored()[self._name], records("night.md")[self._name]
        print(f"{self._title} {about['told']}\n{run['config']}")
        kind, first = about["shows"].split()[0], int(about.get("from", 1))
        if kind == "log":
            print(f"Means of the steps above each column, by TRL's names.\n{log(run, first)}")
        elif kind == "chart":
            draw(run["curve"])
        else:
            print(transcript(run["rows"], tokens=kind == "batch"))
        if kind == "batch":
            for name, values in run["curve"].items():
                here = values[-1:] if name == "loss" else values
                print(f"{name}: {', '.join(f'{value:g}' for value in here)}")

    def measure(self, *_: Any) -> None:
        """Say that there's nothing to measure."""
        print(f"{self._title} What came in is all there is; nothing more can be measured.")

    def diagnose(self, *answers: int | str) -> None:
        """Print whether these, one or two, are right, and what decides."""
        print(self.judged(*answers))

    def judged(self, *answers: int | str) -> str:
        """What `diagnose` prints."""
        answers = tuple(a for a in answers if not isinstance(a, str) or a.strip(" ."))
        if not 1 <= len(answers) <= 2:
            return f"Arrival {self.place} waits for one diagnosis, or two."
        pairs = [named(answer) for answer in answers]
        if troubles := [trouble for name, trouble in pairs if name is None]:
            return "\n".join(troubles)
        about, given = records("night.md")[self._name], {name for name, _ in pairs}
        has = about["has"].split("; ")
        points = len(given & {*has}) / max(len(given), len(has))
        first = {"answers": sorted(given), "points": points}
        if self.place:
            key = f"night: {self._name}"  # another order of arrival is no second chance
            progress.remember("clinic", key, first)
            first = progress.recall("clinic")[key]
        said = f"You said {' and '.join(sorted(given))}: {points:g} of 1 point."
        if first["answers"] != sorted(given):
            said += f" Your first answer counts, and it had {first['points']:g}."
        cures = [f"Cure: {notes_by_diagnosis()[name]['cure']}." for name in has]
        it_was = f"Arrival {self.place}: {' and '.join(has)}."
        return "\n".join([it_was, said, f"What decides: {about['tell']}.", *cures])


def night(place: int, seed: int = 0) -> Arrival:
    """The run that comes in at this place, 1 to 12; the seed shuffles them. 0 is an example."""
    order = sorted({*stored()} - {EXAMPLE})
    Random(seed).shuffle(order)
    if isinstance(place, bool) or place not in range(len(order) + 1):
        raise ValueError(f"place: expected 1 to {len(order)}, got {place!r}")
    return Arrival(place, [EXAMPLE, *order][place])


@cache
def stored() -> dict[str, dict[str, Any]]:
    text = (data_folder() / "results" / "night.json").read_text("utf-8")
    return {run["name"]: run for run in json.loads(text)["runs"]}


def log(run: dict[str, Any], first: int) -> str:
    """The names of TRL, and a column for each part of the run from a step on, or each last step."""
    curve, start = run["curve"], max(1, first - 1)
    end = len(next(iter(curve.values())))
    bounds = [start + (end - start) * part // PARTS for part in range(PARTS + 1)]
    if first < 0:  # the last steps, one by one
        bounds = [*range(end + first, end + 1)]
    columns: dict[str, Readings] = {}
    for start, end in zip([0] * (first == 1) + bounds, [1] * (first == 1) + bounds[1:]):
        means = {name: fmean(values[start:end]) for name, values in curve.items()}
        columns[f"{start + 1}-{end}" if end > start + 1 else f"{end}"] = means
    return side_by_side(columns)


def transcript(rows: list[list[Any]], tokens: bool = False) -> str:
    """Each prompt once, and below it reward, tokens and text of what was written."""
    lines, above = ["reward  tokens" if tokens else "reward"], None
    for prompt, written, reward, length in rows:
        lines += [f"\n{prompt!r}"] * (prompt != above)
        lines.append(f"{reward:6.2f}  " + f"{length:6}  " * tokens + repr(written))
        above = prompt
    return "\n".join(lines)


def draw(curve: dict[str, list[float]]) -> None:
    """A panel for each of the metrics, by the names of TRL."""
    _, axes = plt.subplots(1, len(curve), figsize=(7, 2.1))
    for ax, (name, values) in zip(axes, curve.items(), strict=True):
        ax.plot(range(1, len(values) + 1), values, color=plots.ORANGE, lw=0.9)
        ax.set_title(name, fontsize=8)
        ax.set_xlabel("step", fontsize=8)
        ax.tick_params(labelsize=7)
        ax.set_ylim(min(0, *values), 1.05 * max(*values, 0.01))
    plt.show()
