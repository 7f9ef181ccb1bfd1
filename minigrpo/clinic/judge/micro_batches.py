"""Micro-batches: do two parts of a batch add up to the whole?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minigrpo.clinic.judge.asking import Answer, same
from minigrpo.clinic.judge.probes import BUILT_IN, Probe, rows
from minigrpo.clinic.judge.trial import Trial

NAME = "micro_batches_do_not_add_up"
SAYS = (
    "Two parts of a batch that are given the count of the whole don't add up to its loss and "
    "gradient, so the step depends on how the batch was cut."
)
WEIGHTS = {  # of parts with 3 and with 5 tokens, of 1 and of 2 rows
    (1.0, 1.0): "the losses of two parts add up to the loss of the whole batch.",
    (1 / 3, 2 / 3): "the loss of the whole batch is the mean of its parts, weighted by their rows. "
    "Parts with equally many rows may be averaged.",
    (3 / 8, 5 / 8): "the mean of two parts isn't the loss of the whole batch. Weight them by their "
    "tokens, or divide by the count of the whole batch.",
}
NEITHER = "the loss of the whole batch is no mean of its parts, weighted by rows or by tokens."


class MicroBatches:
    """What a trial's function says of a batch and of its two parts."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.judged = trial, trial.judged
        asked = "how" in trial.free
        modes = BUILT_IN["how"] if asked else (trial.assumed.get("how", "sequence_mean"),)
        self.odd: tuple[Probe, Answer, Answer] | None = None
        self.words, self.read = "", trial.kind != "loss"
        for how in modes if trial.kind == "loss" else ():
            self.ask(how)
        self.judged.unused += [] if self.read else sorted(self.judged.counts)
        by_tokens = self.words.endswith(WEIGHTS[3 / 8, 5 / 8])
        self.ignored = sorted(self.judged.counts) if by_tokens and not self.read else []

    def ask(self, how: str) -> None:
        ratios = [[1.1, 0.9, 1, 1], [1.05, 1, 0.95, 1.1], [0.9, 1, 1, 1]]
        mask = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
        batch = rows(ratios, [1, -2, 0.5], mask, kl=2.0, kl_weight=0.1, how=how)
        whole, twice = self.reply(batch), self.reply(batch, whole=(6, 16))
        parts = [self.reply(batch, cut, whole=(3, 8)) for cut in (slice(0, 1), slice(1, 3))]
        if any(isinstance(reply, str) for reply in (whole, *parts)):
            return
        sums = {weights: added(parts, weights) for weights in WEIGHTS}
        told = next((words for w, words in WEIGHTS.items() if same(sums[w], whole)), NEITHER)
        self.words = self.words or f"Micro-batches: {told}"
        counted = not same(twice, whole)
        self.read |= counted
        if counted and told != WEIGHTS[1.0, 1.0]:
            words = f"{batch.what}, in parts of 1 row and 2 rows"
            self.odd = batch._replace(what=words), whole, sums[1.0, 1.0]

    def reply(self, batch: Probe, cut: slice = slice(None), **whole: Any) -> Answer:
        inputs = {k: v[cut] if isinstance(v, Tensor) else v for k, v in batch.inputs.items()}
        return self.trial.reply(batch, **inputs, **whole)


def added(parts: list[Answer], weights: tuple[float, ...]) -> Answer:
    """The sum of their values, and their gradients one below the other."""
    values, *gradients = zip(*([w * x for x in part] for part, w in zip(parts, weights)))
    return [sum(values), *map(torch.cat, gradients)]
