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
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt

from minigrpo.checks import is_whole_number
from minigrpo.clinic.charts import Readings, side_by_side
from minigrpo.clinic.diagnosis import named
from minigrpo.clinic.patients import notes_by_diagnosis, records
from minigrpo.files import data_folder
from minigrpo.notebook import plots, progress

EXAMPLE, ARRIVALS, PARTS = "eight tokens", 13, 7  # place 0, those after it, columns of a log


@dataclass(frozen=True, eq=False, repr=False)
class Arrival:
    """A run that came in at night. One thing is wrong with it, or two, or nothing."""

    place: int
    _name: str

    @property
    def _title(self) -> str:
        return f"Arrival {self.place} of {ARRIVALS}."

    @property
    def _about(self) -> dict[str, str]:
        return records("night.md")[self._name]

    def show(self) -> None:
        """What came in: a log, a chart, or completions of the last batch."""
        run, about = stored()[self._name], self._about
        print(fill(f"{self._title} {about['told']} {run['config']} {about['setup']}", width=96))
        kind, steps = about["shows"].split()[0], about.get("steps", "")
        if kind == "log":
            single = steps.startswith(("first", "last"))
            print("By TRL's names" + (", step by step." if single else ", means of these steps."))
            print(log(run["curve"], steps))
        elif kind == "chart":
            draw(run["curve"])
        else:
            which = about.get("which", "").split() or range(len(run["rows"]))
            print(page([run["rows"][int(row)] for row in which]))
            for name, values in run["curve"].items():
                here = values[-1:] if name == "loss" else values
                print(f"{name}: {', '.join(f'{value:g}' for value in here)}")

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
        about, given = self._about, {name for name, _ in pairs}
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
    """The run that comes in at this place, 1 to 13, or 0, an example.

    Another seed has another order, and of the five runs with a tool perhaps another one.
    """
    if not is_whole_number(place) or place not in range(ARRIVALS + 1):
        raise ValueError(f"place: expected 1 to {ARRIVALS}, got {place!r}")
    names = sorted({*stored()} - {EXAMPLE})
    Random(seed).shuffle(names)
    with_tool = [name for name in names if name.startswith("open build")]
    order = [EXAMPLE, *(name for name in names if name not in with_tool[:-1])]
    return Arrival(place, order[place])


@cache
def stored() -> dict[str, dict[str, Any]]:
    text = (data_folder() / "results" / "night.json").read_text("utf-8")
    return {run["name"]: run for run in json.loads(text)["runs"]}


def log(curve: dict[str, list[float]], steps: str = "") -> str:
    """Step 1 and each part of the run; or "from 11", "each 16", the "first 8" or "last 8"."""
    which, number = steps.split() if steps else ("", "2")
    end = len(next(iter(curve.values())))
    begin = end - int(number) if which == "last" else 0
    bounds = [*range(begin, begin + int(number) + 1)]
    if which == "each":
        bounds = [*range(0, end, int(number)), end]
    elif which in ("", "from"):
        start = int(number) - 1
        bounds = [start + (end - start) * part // PARTS for part in range(PARTS + 1)]
        bounds = bounds if which else [0, *bounds]
    columns: dict[str, Readings] = {}
    for start, end in zip(bounds, bounds[1:]):
        means = {name: fmean(values[start:end]) for name, values in curve.items()}
        columns[f"{start + 1}-{end}" if end > start + 1 else f"{end}"] = means
    return side_by_side(columns)


def page(rows: list[tuple[str, str, dict[str, float]]]) -> str:
    """Each prompt once, and below it the numbers and the text of each completion."""
    names = [name for name in rows[0][2] if name != "prompt"]
    lines, above = ["  ".join(f"{name:>7}" for name in names)], None
    for prompt, written, row in rows:
        lines += [f"\n{prompt!r}"] * (prompt != above)
        shown = (f"{row[name]:7d}" if name == "tokens" else f"{row[name]:7.2f}" for name in names)
        lines.append(f"{'  '.join(shown)}  {written!r}")
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
