"""Charts: what is known of a run of GRPO, and the numbers that any dashboard shows of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from minigrpo.grpo import StepMetrics
from minigrpo.notebook.plots import METRICS, metric

Value = int | float | tuple[float, ...]
Readings = dict[str, Value]
"""What was measured of one run, by name; NaN where there is nothing to measure."""


@dataclass(frozen=True, eq=False)
class Chart:
    """What is known of a run."""

    steps: list[StepMetrics]
    policy: nn.Module  # at the end
    moved: float  # how far the weights went, relative to their size
    stopped: str | None = None  # what stopped the run early

    def last(self, name: str) -> float:
        """Mean of a metric over the last three steps; NaN if there are none."""
        values = [metric(m, name) for m in self.steps[-3:]]
        return sum(values) / len(values) if values and None not in values else math.nan


def dashboard(chart: Chart) -> Readings:
    """At the first step, and the mean of the last three; by the names of TRL in brackets."""
    readings: Readings = {"steps done": len(chart.steps)}
    for key, (_, name) in {**METRICS, "loss": ("", "loss (loss)")}.items():
        first = [metric(m, key) for m in chart.steps[:1]]
        readings[name] = (math.nan if first in ([], [None]) else first[0], chart.last(key))
    return readings


def shown(value: Value) -> str:
    """A value as a table shows it: a dash where there is nothing to measure."""
    if isinstance(value, tuple):
        return "  ".join(f"{shown(part):>7}" for part in value)
    if math.isnan(value):
        return "-"
    if isinstance(value, int) or value == 0:
        return f"{value:.0f}"
    value = float(f"{value:.4g}")
    digits = sum(abs(value) < bound for bound in (1000, 100, 10, 1))
    return f"{value:.{digits}f}" if abs(value) >= 1e-3 else f"{value:.0e}"


def side_by_side(columns: Mapping[str, Readings]) -> str:
    """Readings of the same names as a table, a column for each run."""
    names = list(next(iter(columns.values())))
    cells = {run: [shown(readings[name]) for name in names] for run, readings in columns.items()}
    left = max(map(len, names))
    widths = {run: max(len(run), *map(len, rows)) for run, rows in cells.items()}
    lines = [" " * left + "".join(f"  {run:>{widths[run]}}" for run in cells)]
    for at, name in enumerate(names):
        row = "".join(f"  {rows[at]:>{widths[run]}}" for run, rows in cells.items())
        lines.append(f"{name:{left}}{row}")
    return "\n".join(line.rstrip() for line in lines)
