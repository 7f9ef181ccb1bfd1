"""Peak memory of ten GRPO steps, beside that of TRL's ten steps. Each runs in its own process.

    python tools/bench.py --only memory                  # needs the extra "scale"

Most of it is what importing takes, so there is a second line without that. This file imports
no torch until it is such a process: on Linux a new process starts out with the peak of the one
that started it.
"""

from __future__ import annotations

import subprocess
import sys

from lines import Line, has_trl, over

STEPS, UPDATES = 10, 2


def mib() -> float:
    """The largest memory that this process has had."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def take_steps(side: str) -> tuple[float, float]:
    """MiB at peak after the imports, and after ten steps."""
    import peers

    from minigrpo.notebook.setup import setup

    if side == "trl":
        import trl

        _ = trl.GRPOConfig, trl.GRPOTrainer  # it imports the rest when it is asked for them
    setup(seed=0)
    imported = mib()
    (peers.our_steps if side == "minigrpo" else peers.their_steps)(STEPS, UPDATES)
    return imported, mib()


def memory(quick: bool) -> list[Line]:
    """MiB at peak, of the whole process and of what comes after the imports."""
    if sys.platform == "win32":
        print("memory is left out: Windows has no getrusage")
        return []
    if not has_trl():
        return []
    peaks: dict[str, list[float]] = {"minigrpo": [], "trl": []}
    after: dict[str, list[float]] = {"minigrpo": [], "trl": []}
    for _ in range(1 if quick else 3):
        for side in peaks:
            told = subprocess.run(
                [sys.executable, __file__, side], stdout=subprocess.PIPE, text=True, check=True
            ).stdout
            imported, peak = map(float, told.splitlines()[-1].split())
            peaks[side].append(peak)
            after[side].append(peak - imported)
    return [
        Line(
            f"MiB at peak in ten steps of GRPO, {what}",
            "GRPOTrainer of TRL",
            "trl",
            values["minigrpo"],
            values["trl"],
            over(values["minigrpo"], values["trl"]),
            less=True,
        )
        for what, values in (("the whole process", peaks), ("without the imports", after))
    ]


if __name__ == "__main__":
    print(*take_steps(sys.argv[1]))
