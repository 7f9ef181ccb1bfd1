"""The night shift: runs of which one log, chart or transcript has come in, without a healthy twin.

`night.md` says what they have, and data/results/night.json what is shown of them (the command
tools/experiments/text_runs.py measures them).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
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

FIRST = (0, 1), (1, 10), (10, 20), (20, 40)  # steps that a column of a log is the mean of
FROM = 40  # and after these, in four equal parts


@dataclass(frozen=True, eq=False)
class Arrival:
    """A run that came in at night. One thing is wrong with it, or two, or nothing."""

    place: int
    name: str = field(repr=False)

    def show(self) -> None:
        """What came in: a log, a chart, or completions of the last batch."""
        run, about = stored()[self.name], records("night.md")[self.name]
        print(f"Arrival {self.place} of {len(stored())}. {about['told']}\n{run['config']}")
        if "rows" in run:
            print(transcript(run["rows"]))
        elif about["shows"] == "log":
            print(f"Means of the steps above each column, by TRL's names.\n{log(run['curve'])}")
        else:
            draw(run["curve"])

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
        given, has = {name for name, _ in pairs}, records("night.md")[self.name]["has"].split("; ")
        points = len(given & {*has}) / max(len(given), len(has))
        key = f"night: {self.name}"  # another order of arrival is no second chance
        progress.remember("clinic", key, {"answers": sorted(given), "points": points})
        first = progress.recall("clinic")[key]
        lines = [f"Arrival {self.place}: {' and '.join(has)}. {points:g} of 1 point."]
        if first["answers"] != sorted(given):
            lines[0] += f" Your first answer counts, and it had {first['points']:g}."
        lines += [f"What decides: {records('night.md')[self.name]['tell']}."]
        return "\n".join(lines + [f"Cure: {notes_by_diagnosis()[name]['cure']}." for name in has])


def night(place: int, seed: int = 0) -> Arrival:
    """The run that comes in at this place, 1 to 12; the seed shuffles them."""
    order = sorted(stored())
    Random(seed).shuffle(order)
    if isinstance(place, bool) or place not in range(1, len(order) + 1):
        raise ValueError(f"place: expected 1 to {len(order)}, got {place!r}")
    return Arrival(place, order[place - 1])


@cache
def stored() -> dict[str, dict[str, Any]]:
    text = (data_folder() / "results" / "night.json").read_text("utf-8")
    return {run["name"]: run for run in json.loads(text)["runs"]}


def log(curve: dict[str, list[float]]) -> str:
    """The names of TRL, and a column for each part of the run."""
    part = (len(curve["reward"]) - FROM) // 4
    parts = [*FIRST, *((FROM + part * k, FROM + part * (k + 1)) for k in range(4))]
    columns: dict[str, Readings] = {}
    for start, end in parts:
        means = {name: fmean(values[start:end]) for name, values in curve.items()}
        columns[f"{start + 1}-{end}" if end > 1 else "1"] = means
    return side_by_side(columns)


def transcript(rows: list[list[Any]]) -> str:
    """Each prompt once, and below it what was written and what it was rewarded with."""
    lines, above = [], None
    for prompt, written, reward in rows:
        lines += [f"\n{prompt!r}"] * (prompt != above) + [f"  {reward:5.2f}  {written!r}"]
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
