"""At the size of real models: memory with their vocabularies, and 135 million parameters.

    python tools/bench.py --only vocabulary real_model        # needs the extra "scale"
    python tools/bench.py --only autocast --model FOLDER      # see tools/smollm2.py

Each measurement is a process of its own, real_work.py, on all cores. This file imports no torch:
on Linux a new process starts out with the peak of the one that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lines import Line, has_trl, over

WORK = Path(__file__).with_name("real_work.py")
MODEL = "MINIGRPO_BENCH_MODEL"  # set by tools/bench.py --model
PARAMETERS = "135 million parameters, all cores"
THIRD = "a third or less"
NO_MORE = "1 or less"
UPDATE = "MiB beside the model, an update of 64 rows at V = 50,000"
SCORE = "MiB beside the model, scoring 128 rows at V = 151,936"
FEW = 16  # rows of the plain way to score: all of them would take more than 20 GiB


def measured(*what: object, quick: bool = False) -> Any:
    """What a process of its own has found out."""
    if sys.platform == "win32":
        raise RuntimeError("Windows has no getrusage")
    options = ["--quick"] if quick else []
    command = [sys.executable, str(WORK), *map(str, what), *options]
    environment = {**os.environ, "MINIGRPO_THREADS": str(os.cpu_count())}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def against(what: str, peer: str, mine: float, other: float, target: str) -> Line:
    """Memory of two sides, once: it hardly varies."""
    package = "trl" if "TRL" in peer else "torch"
    return Line(what, peer, package, [mine], [other], [mine / other], target, less=True)


def vocabulary(quick: bool) -> list[Line]:
    """Peak memory of updates and of scoring where the logits are the largest thing there is."""
    if sys.platform == "win32" or not has_trl():
        return []
    plain = "a log-softmax of all logits, entropy with gradient"
    whole = measured("update", "plain", 64, quick=quick)
    lines = []
    for rows in (64, 16):
        what = f"{UPDATE}, {rows} at once"
        mine = measured("update", "ours", rows, quick=quick)
        trl = measured("update", "trl", rows, quick=quick)
        lines.append(against(what, f"{plain}, all at once", mine, whole, THIRD))
        lines.append(against(what, "GRPOTrainer of TRL", mine, trl, NO_MORE))
    mine = measured("score", "ours", 128, quick=quick)
    other = measured("score", "plain", FEW, quick=quick) * 128 / FEW
    peer = f"{plain.split(',')[0]}, scaled from {FEW} rows"
    return [*lines, against(SCORE, peer, mine, other, "less than 4,096 MiB")]


def real_model(quick: bool) -> list[Line]:
    """Three steps of the shape of SmolLM2-135M beside TRL: seconds of the last two, and memory."""
    if sys.platform == "win32" or not has_trl():
        return []
    mine, other = (measured("steps", side, quick=quick) for side in ("ours", "trl"))
    peer = "GRPOTrainer of TRL"
    ours, theirs = mine["seconds"][1:], other["seconds"][1:]
    speed = Line(
        f"seconds per step of GRPO, {PARAMETERS}",
        peer,
        "trl",
        ours,
        theirs,
        over(theirs, ours),
        "1 or more",
    )
    what = f"MiB at peak in three steps, {PARAMETERS}"
    lines = [speed, against(f"{what}, the whole process", peer, mine["peak"], other["peak"], "")]
    beside = [one["peak"] - one["built"] for one in (mine, other)]
    what += ", beside the model"
    return [*lines, against(what, peer, *beside, NO_MORE)]


def autocast(quick: bool) -> list[Line]:
    """What bfloat16 gains in an update of SmolLM2-135M-Instruct, and how it moves the gradient."""
    if not (folder := os.environ.get(MODEL)):
        print("autocast is left out: --model FOLDER names the one that tools/smollm2.py makes")
        return []
    found = measured("autocast", folder, quick=quick)
    mine, other = found["seconds"]["bfloat16"], found["seconds"]["float32"]
    where = "an update of SmolLM2-135M-Instruct, all cores"
    what = f"seconds of {where}: bfloat16 by autocast"
    moved, norm = found["moved"], found["norm"]
    return [
        Line(what, "float32", "torch", mine, other, over(other, mine)),
        against(f"norm of what bfloat16 changes in the gradient of {where}",
                "norm of the gradient", moved, norm, ""),
    ]  # fmt: skip
