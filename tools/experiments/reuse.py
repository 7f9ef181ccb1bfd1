"""Sweep the updates per batch, the length of the texts and the level of the ratio, for notebook 03.

    python tools/experiments/reuse.py          what is not stored yet (over an hour on two cores)
    python tools/experiments/reuse.py --again  all of it

Writes data/results/reuse.json after each run.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import store
from store import ROOT, Results, Store

from minigrpo.gpt import load_gpt
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.notebook.setup import setup
from minigrpo.objective import VARIANTS
from minigrpo.rewards import TextTask

BASE = ROOT / "data" / "char_gpt.safetensors"
PROMPTS = ("ROMEO:", "JULIET:", "HENRY:", "My lord", "O, ", "To be, or")
ARMS: dict[str, dict[str, Any]] = {  # one ratio per text, its geometric mean, one per token
    "product": {"level": "sequence"},
    "geometric": {"level": "geometric", "clip": VARIANTS["gspo"]["clip"]},
    "token": {"level": "token"},
    "token, no clip": {"level": "token", "clip": (1.0, 1e9)},  # a range that no ratio leaves
}
LENGTHS = (24, 128)  # characters per text
STEPS = 16  # batches of 4 prompts x 16 texts: 1,024 texts in all


class Run(NamedTuple):
    """What is varied."""

    arm: str
    length: int
    epochs: int  # updates on each batch
    lr: float
    seed: int


RUNS = [
    Run(arm, length, epochs, lr, seed)
    for lr in (3e-4, 1e-4, 1e-3)
    for length in (LENGTHS if lr == 3e-4 else LENGTHS[:1])  # other rates: short texts only
    for seed, epochs, arm in product(range(3), (1, 2, 4, 8), ARMS)
]


def config(cell: Run) -> GRPOConfig:
    """The settings of one run: those of notebook 03, but for what is varied."""
    return GRPOConfig(
        steps=STEPS, prompts_per_step=4, group_size=16, max_new_tokens=cell.length,
        inner_epochs=cell.epochs, lr=cell.lr, seed=cell.seed, **ARMS[cell.arm],
    )  # fmt: skip


def settings() -> Results:
    """All that decides how the runs go."""
    common = asdict(config(RUNS[0]))
    for varied in ("level", "clip", "max_new_tokens", "inner_epochs", "lr", "seed"):
        del common[varied]
    return {"base": store.of_file(BASE), "arms": ARMS, "config": common}


def measure(cell: Run) -> Results:
    """Train the char GPT to write the letter e; the curves rounded to four digits."""
    setup(seed=0)
    steps = list(train_grpo(load_gpt(BASE).eval(), TextTask(PROMPTS), config(cell)))
    return {
        **cell._asdict(),
        "seconds": round(sum(m.seconds for m in steps), 1),
        "reward": [round(m.reward, 4) for m in steps],
        "clipped": [round(m.clip_low + m.clip_high, 4) for m in steps],  # mean over the updates
    }


STORE = Store("reuse.json", RUNS, settings)
main = partial(STORE.main, measure, over=store.in_parallel)

if __name__ == "__main__":
    main()
