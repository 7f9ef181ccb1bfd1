"""What share of the machine training uses: its arithmetic beside that of a large matrix product.

    python tools/bench.py --only grpo_peak pretraining_peak

Models as small as these are held up by Python and by memory; the share says how much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from lines import Line, over, seconds
from peers import our_steps
from speed import our_recipe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minigrpo import grpo
from minigrpo.corpus import CharTokenizer, offline_text

STEPS = 12


def peak(n: int = 1024) -> float:
    """Floating-point operations per second in a square matrix product, float32."""
    a, b = torch.rand(n, n), torch.rand(n, n)
    return 2 * n**3 / min(seconds(lambda: a @ b) for _ in range(20))


def flops(run: Callable[[], object]) -> int:
    """Floating-point operations of a call, in its matrix products.

    The counter knows no fused attention on a CPU, so attention is counted as two plain products.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def share(what: str, rates: list[float], best: list[float]) -> list[Line]:
    """The line: both sides in billions per second."""
    mine, other = ([rate / 1e9 for rate in side] for side in (rates, best))
    what = f"billion operations per second, {what}"
    return [Line(what, "a matrix product, 1024 x 1024", "torch", mine, other, over(mine, other))]


@contextmanager
def timed(*names: str) -> Iterator[dict[str, float]]:
    """Seconds spent in these functions of `grpo`, by name."""
    spent, originals = dict.fromkeys(names, 0.0), {name: getattr(grpo, name) for name in names}

    def watch(name: str) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            began = time.perf_counter()
            try:
                return originals[name](*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return call

    try:
        for name in names:
            setattr(grpo, name, watch(name))
        yield spent
    finally:
        for name in names:
            setattr(grpo, name, originals[name])


def grpo_peak(quick: bool) -> list[Line]:
    """Steps of GRPO with 2 updates, from the rollout to the last update."""
    seeds = range(1 if quick else 5)
    our_steps(1, 2)  # warm up
    took, best = [], []
    with timed("sample", "score", "learn") as spent:
        for seed in seeds:
            took.append(sum(our_steps(STEPS, 2, seed)))
            best.append(peak())
    # Counting is slow, so it is done apart: the same seeds write the same texts.
    counts = [flops(lambda seed=seed: our_steps(STEPS, 2, seed)) for seed in seeds]
    updates = spent["learn"] - spent["score"]
    parts = {"rollout": spent["sample"], "scoring": spent["score"], "updates": updates}
    told = ", ".join(f"{what} {time / sum(took):.0%}" for what, time in parts.items())
    print(f"  a step of GRPO takes {sum(took) / len(took) / STEPS:.3f} s: {told}")
    return share("GRPO with 2 updates", over(counts, took), best)


def pretraining_peak(quick: bool) -> list[Line]:
    """A step of notebook 01's recipe, the matrix products of Muon included."""
    text = CharTokenizer().encode(offline_text())
    steps = our_recipe(text, steps=420).steps
    next(steps)  # warm up
    each = flops(lambda: next(steps))
    rates, best = [], []
    for _ in range(3 if quick else 15):
        rates.append(each / next(steps))
        best.append(peak())
    return share("pretraining", rates, best)
