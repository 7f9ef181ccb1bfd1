"""A line of the page of ratios, and what the sections measure it with. Needs no torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import minigrpo


@dataclass(frozen=True)
class Line:
    """Two sides of a comparison, one value per round.

    Attributes:
        what: is measured, with its unit.
        peer: what the package is compared with.
        package: whose version the peer has.
        ours, theirs: values of the two sides.
        ratio: of them, in each round.
        target: the ratio to reach, in words; empty if there is none.
        less: whether a small ratio is the good one.
    """

    what: str
    peer: str
    package: str
    ours: list[float]
    theirs: list[float]
    ratio: list[float]
    target: str = ""
    less: bool = False

    def stored(self) -> dict[str, Any]:
        """As it stands in data/results/bench.json."""
        peer = {"name": self.peer, "version": f"{self.package} {version(self.package)}"}
        return {
            "what": self.what,
            "ours": summary(self.ours),
            "peer": peer | summary(self.theirs),
            "ratio": summary(self.ratio),
            "target": self.target,
            "better": "less" if self.less else "more",
        }


def summary(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest, to four digits."""
    found = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def version(package: str) -> str:
    """Of a package that is installed, or of this one, which may lie there without being so."""
    return minigrpo.__version__ if package == "minigrpo" else metadata.version(package)


def over(above: list[float], below: list[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def seconds(run: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def alternate(*sides: Callable[[], object], repeats: int) -> list[list[float]]:
    """Seconds of each side, measured in turns."""
    rounds = [[seconds(side) for side in sides] for _ in range(repeats)]
    return [list(times) for times in zip(*rounds)]


def has_trl() -> bool:
    """Whether TRL is there to be compared with; says so if it is not."""
    try:
        version("trl")
    except metadata.PackageNotFoundError:
        print("TRL is not installed (pip install -e '.[scale]'): no comparison with it")
        return False
    return True
