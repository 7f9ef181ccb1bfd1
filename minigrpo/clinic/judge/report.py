"""What the judge of losses answers, and how a file is judged in a process of its own.

Without torch, which that process loads, so that the command itself begins at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SEARCH = 30.0
"""Seconds that the search for a name may take."""


class Unjudged(Exception):
    """Why there is no verdict, in one sentence."""


class Report(NamedTuple):
    """What the judge found; printed, it is the text."""

    verdict: str  # "right", "notes", "unknown", "mistake", or "not judged"
    mistakes: list[str]
    notes: list[str]
    cautions: list[str]
    text: str  # one screen
    more: str  # with everything that a maintainer might ask
    details: dict[str, Any]  # the same as JSON

    @property
    def passed(self) -> bool:
        """Right, perhaps with notes."""
        return self.verdict in ("right", "notes")

    def __str__(self) -> str:
        return self.text


def unjudged(why: object) -> Report:
    text, details = f"Not judged: {why}.", {"verdict": "not judged", "why": str(why)}
    return Report("not judged", [], [], [], text, text, details)


def judge_file(
    target: str | list[str],  # file.py:name, or what follows --from
    built_in: dict[str, Any],
    seconds: float = 60,
    names: Mapping[str, str] = {},
    like: str | None = None,
) -> Report:
    """Judge in a process of its own, which may hang, print without end, or end Python.

    `seconds` are for what the file does; the search for a name has its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        root = str(Path(__file__).resolve().parents[3])
        python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-B", "-m", "minigrpo.clinic", "judge", "child", str(path)]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        env = {**os.environ, "PYTHONPATH": python_path}
        command.append(json.dumps([target, built_in, seconds, {**names}, like]))
        with contextlib.suppress(subprocess.TimeoutExpired):  # of what holds all of Python up
            ran = subprocess.run(command, timeout=seconds + 4 * SEARCH, env=env, **quiet)
            if path.is_file():
                return Report(*json.loads(path.read_text("utf-8")))
            return unjudged(f"the file ended Python with exit code {ran.returncode}")
        return unjudged(too_slow(seconds))


def too_slow(seconds: float) -> str:
    return f"your code didn't finish within {seconds:g} seconds (--seconds)"
