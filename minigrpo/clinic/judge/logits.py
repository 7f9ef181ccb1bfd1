"""Losses that want logits: the judge makes them, and so sees the shift and the temperature, too.

The token that was taken gets exactly the log-prob of a probe. What the function scores is read from
its gradient: at which positions there is one, which token's it is, and at which temperature.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigrpo.clinic.judge.asking import (
    FLOATS,
    MASKS,
    OLD,
    Judged,
    first,
    fitting,
    mapped,
    quietly,
    role,
)
from minigrpo.clinic.judge.probes import DEFAULTS

WITH_LOGITS = {  # how what comes with logits is called; the first that fits counts
    "ref_logits": r"(\w+_)?ref(erence)?_?(\w*_)?logits|logits_ref",
    "old_logits": rf"(\w+_)?{OLD}_?(\w*_)?logits|logits_old",
    "logits": r"(\w+_)?logits",
    "ids": r"((input|token|completion|response|target|action|generated|output|label|sampled)_?)?"
           r"(ids|tokens?|labels?|targets?|actions?|responses?|completions?)|sequences",
    "temperature": r"temp(erature)?",
}  # fmt: skip
OURS = {"logits": "log_probs", "old_logits": "old_log_probs", "ref_logits": "ref_log_probs"}
TEMPERATURE, VOCABULARY = 0.7, 8
OF_LOGITS = {
    "logits_not_shifted": "The logits are scored with the wrong tokens. logits[:, t] has read the "
    "tokens up to t and predicts t + 1, so logits[:, :-1] goes with input_ids[:, 1:].",
    "mask_off_by_one": "The mask is off by one. It's cut like the logits, mask[:, :-1], and the "
    "tokens that are scored are those of mask[:, 1:].",
    "temperature_ignored": "The temperature is a parameter that changes nothing. The logits should "
    "be divided by it.",
    "temperature_multiplied": "The logits are multiplied by the temperature. They should be "
    "divided by it.",
    "temperature_after_the_softmax": "The log-probs are divided by the temperature. The logits "
    "should be, before the softmax.",
    "logits_without_a_softmax": "The logits are used as log-probs, without log_softmax.",
}
TAKEN_AS_SHIFTED = (  # a note with the name of the mistake
    "It scores logits[:, t] with input_ids[:, t]. That's right where the logits were shifted by "
    "one before. As a model returns them, logits[:, t] predicts t + 1."
)


class Layout(NamedTuple):
    """By how much these are longer than the completions; and where old log-probs begin."""

    logits: int = 0
    ids: int = 0
    mask: int = 0
    others: int = 0  # old and reference log-probs, and advantages if there is one per token
    others_from: int = 0


LAYOUTS = [Layout(), *(Layout(1, 1, m, *o) for m, o in product((0, 1), ((0, 0), (1, 1), (1, 0))))]
LAYOUTS += [Layout(1, 0)]


class Reading(NamedTuple):
    """What a function reads: where it has the completions begin, and the softmax that it takes."""

    layout: Layout
    logits_from: int
    ids_from: int
    mask_from: int
    temperature: float = 1.0  # 0: no softmax at all
    after: bool = False  # what comes out of it, or of none, is divided by the temperature

    def mistakes(self, given: bool) -> list[str]:
        """By name; `given` is whether the temperature is a parameter."""
        layout, shifted = self.layout, (self.logits_from, self.ids_from) == (0, self.layout.ids)
        names = [] if shifted else ["logits_not_shifted"]
        if shifted and self.mask_from != layout.mask and layout.others == layout.others_from:
            names.append("mask_off_by_one")  # where old log-probs aren't cut like that, too
        names += ["logits_without_a_softmax"] * (self.temperature == 0)
        one = "temperature_after_the_softmax" if self.after else "temperature_ignored"
        known = {1.0: one, 1 / TEMPERATURE: "temperature_multiplied"} if given else {}
        return names + [name for at, name in known.items() if self.temperature == at]


def from_logits(function: Callable, names: Mapping[str, str]) -> tuple[Callable, Mapping[str, str]]:
    """The function, or if it takes logits, one that takes log-probs in their place; and `names`."""
    try:
        wrapped = FromLogits(function, names)
    except (TypeError, ValueError):
        return function, names
    return wrapped, wrapped.names


class FromLogits:
    """A loss of log-probs, made of one that takes logits. ValueError: it takes none."""

    def __init__(self, function: Callable, names: Mapping[str, str]) -> None:
        signature = inspect.signature(getattr(function, "forward", function))
        self.function, self.flat, self.filling = function, False, -0.5
        self.__code__ = getattr(getattr(function, "forward", function), "__code__", None)
        self.temperature = TEMPERATURE
        parameters = [p for p in signature.parameters.values() if p.kind != p.VAR_POSITIONAL]
        names = mapped(names, [p.name for p in parameters], WITH_LOGITS)
        said = (names.get(p.name) or role(p) or fitting(WITH_LOGITS, p.name) for p in parameters)
        self.roles = {p.name: to for p, to in zip(parameters, said)}
        self.theirs = {to: name for name, to in self.roles.items() if to in WITH_LOGITS}
        if not {"logits", "ids"} <= self.theirs.keys():
            raise ValueError("it takes no logits")
        self.made = {name: self.theirs[to] for to, name in OURS.items() if to in self.theirs}
        ours = {theirs: name for name, theirs in self.made.items()}
        self.by_label = "completion_mask" not in self.roles.values()  # -100 is masked
        ours |= {self.theirs["ids"]: "completion_mask"} if self.by_label else {}
        self.zeros = {name: 0.0 for name, to in self.roles.items() if to == "entropy_weight"}
        gone = {*self.theirs.values()} - ours.keys()
        by_name = [
            p.replace(name=ours.get(p.name, p.name), kind=max(p.kind, p.KEYWORD_ONLY))
            for p in parameters
            if p.name not in gone
        ]
        self.__signature__ = signature.replace(parameters=by_name)
        self.roles |= {name: name for name in ours.values()}
        self.names = {p.name: names[p.name] for p in by_name if p.name in names}
        self.reading = self.find_out(Judged(self, self.names))

    def __call__(self, **given: Any) -> Any:
        layout, logits_from, ids_from, mask_from, *_ = self.reading
        name_of = {self.roles.get(name) or name: name for name in given}
        count, width = given["log_probs"].shape
        ids = torch.arange(width + layout.ids) + 2 * torch.arange(count)[:, None]
        ids = ids % VOCABULARY
        own = ids[:, ids_from : ids_from + width]
        mask = given.pop(name_of["completion_mask"])
        if self.by_label:
            ids = ids.where(longer(mask.bool(), layout.ids, ids_from, False), -100)
        else:
            given[name_of["completion_mask"]] = longer(mask, layout.mask, mask_from, 0)
        made = [x for name in self.made if (x := given.get(name)) is not None]
        high = torch.stack([x.detach().nan_to_num(-1).max() for x in made]).max()
        less = (high + 1e-6).clamp(min=0)  # no logits have a log-prob of 0, and ratios stay
        for to in ("log_probs", "old_log_probs", "ref_log_probs", "advantages"):
            name = name_of.get(to)
            if not isinstance(x := given.get(name), Tensor) or x.dim() < 2:
                continue
            x = x if to == "advantages" else x - less
            if name in self.made:
                filling = torch.arange(VOCABULARY, 0, -1) / 2
                given[name] = longer(self.logits(x, own), layout.logits, logits_from, filling)
            else:
                given[name] = longer(x, layout.others, layout.others_from, self.filling)
        if self.flat:  # nearly alike, so any shift and temperature have nearly the same ratio
            nearly = 1e-3 * torch.arange(VOCABULARY) - math.log(VOCABULARY)
            nearly = nearly.expand_as(given["log_probs"])
            self.leaf, self.ids = nearly.to(given["log_probs"]).clone().requires_grad_(), ids
            given |= dict.fromkeys(self.made, self.leaf.detach()) | {"log_probs": self.leaf * 1}
        given = {self.made.get(name, name): x for name, x in given.items()}
        others = {"ids": ids, "temperature": self.temperature}
        given |= {self.theirs[to]: x for to, x in others.items() if to in self.theirs}
        return self.function(**(self.zeros | given))

    def logits(self, log_probs: Tensor, ids: Tensor) -> Tensor:
        """(N, T), (N, T) -> (N, T, V): those at which these tokens have these log-probs."""
        x = log_probs * self.temperature if self.reading.after else log_probs
        taken = ids[..., None] == torch.arange(VOCABULARY)
        others = (0.3 * torch.arange(VOCABULARY).to(x)).expand(taken.shape)
        others = others.masked_fill(taken, -torch.inf).log_softmax(-1)
        logits = torch.where(taken, x[..., None], (-x.expm1()).log()[..., None] + others)
        temperature = self.reading.temperature
        return logits * temperature + 1 if temperature else logits

    def find_out(self, judged: Judged) -> Reading:
        """The reading with the fewest mistakes, of all layouts in which nothing is raised."""
        found = []
        for layout, *form in product(LAYOUTS, (False, True), FLOATS, MASKS):
            judged.per_token, judged.dtype, judged.mask = form
            if reading := self.read(judged, layout):
                found.append((len(reading.mistakes("temperature" in self.theirs)), reading, form))
                if not found[-1][0]:
                    break
        self.flat = False
        none = 0, Reading(Layout(), 0, 0, 0), form
        _, reading, form = min(found, key=lambda one: one[0], default=none)
        judged.per_token, judged.dtype, judged.mask = form
        return reading

    def told(self) -> tuple[dict[str, dict], dict[str, dict]]:
        """Mistakes and notes, each with its sentence."""
        heated = "temperature" in self.theirs
        mistakes = {name: {"sentence": OF_LOGITS[name]} for name in self.reading.mistakes(heated)}
        as_read = self.theirs["ids"] == "input_ids" and self.reading.layout == Layout()
        notes = {"logits_not_shifted": {"sentence": TAKEN_AS_SHIFTED}} if as_read else {}
        return mistakes, notes

    def details(self, roles: dict[str, str]) -> dict[str, Any]:
        """Of the report: in what form it was asked, and what its parameters are."""
        layout, (t, longer_t) = self.reading.layout, ("T", "T+1")
        words = f"Logits: given as (N, {longer_t if layout.logits else t}, V), with "
        words += f"{self.theirs['ids']} (N, {longer_t if layout.ids else t})"
        if "temperature" in self.theirs:
            words += f", at a temperature of {TEMPERATURE}"
        elif self.reading.temperature not in (0, 1):
            words += f"; it divides them by {self.reading.temperature:.3g}"
        read_as = {theirs: to for to, theirs in self.theirs.items()}
        read_as |= {name: to for name, to in roles.items() if name not in OURS.values()}
        return {"given": f"{words}.", "read_as": read_as}

    def read(self, judged: Judged, layout: Layout) -> Reading | None:
        """What the gradient says, if nothing depends on what stands beside the completions."""
        self.reading, self.flat = Reading(layout, 0, layout.ids, layout.mask), True
        mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
        old = torch.full(mask.shape, 0.01 - math.log(VOCABULARY))
        inputs = {"log_probs": old - 1, "old_log_probs": old, "ref_log_probs": old}
        inputs |= {"advantages": torch.ones(2), "rewards": torch.tensor([1.0, 0.0])}
        inputs |= {"group_size": 2, "completion_mask": mask, "entropy": old}
        inputs = {k: v for k, v in inputs.items() if k in {*judged.roles.values()}}
        slopes = []
        for self.filling, self.temperature in ((-0.5, TEMPERATURE), (-0.9, TEMPERATURE), (-0.5, 2)):
            try:
                with quietly():
                    loss = first(judged(inputs, {**DEFAULTS, "max_length": 5}))
                    slopes += torch.autograd.grad(loss.sum(), self.leaf)
            except (Exception, SystemExit):
                return None
        self.filling, self.temperature = -0.5, TEMPERATURE
        slope, other, warm = (x.double() / slopes[0].abs().max() for x in slopes)
        seen = slope.abs().amax(-1) > 1e-6  # (N, S)
        if not seen.any() or not alike(slope, other):
            return None
        taken, ids = slope.abs().argmax(-1), self.ids.tolist()
        at = [(ids[i], int(taken[i, s]), s) for i, s in seen.nonzero().tolist()]
        shifts = {row.index(token) - s if token in row else None for row, token, s in at}
        if len(shifts) > 1 or None in shifts:
            return None
        if (where := self.places(seen, mask.bool(), layout, *shifts)) is None:
            return None
        i, s = seen.nonzero()[0].tolist()
        others = [v for v in range(VOCABULARY) if v != taken[i, s]]
        p, q = (slope[i, s, others[:: len(others) - 1]] / slope[i, s, taken[i, s]]).tolist()
        measured = 0.0  # without a softmax the others have no part in it
        if p < -1e-6 and q < -1e-6:
            measured = 1e-3 * (others[-1] - others[0]) / (math.log(q / p) or 1.0)
        usual = TEMPERATURE if "temperature" in self.theirs and measured else measured
        near = [t for t in (1.0, TEMPERATURE, 1 / TEMPERATURE) if abs(measured - t) < 1e-2]
        measured = near[0] if near else usual
        brief = float(f"{measured:.4g}")
        measured = brief if abs(brief - measured) < 2e-5 * measured else measured
        return Reading(layout, *where, measured, measured in (0, 1) and not alike(slope, warm))

    @staticmethod
    def places(seen: Tensor, mask: Tensor, layout: Layout, shift: int) -> list[int] | None:
        """Where logits, ids and mask begin, if these positions have a gradient."""
        width = mask.shape[1]
        long = longer(mask, layout.mask, layout.mask, False)
        starts = product((False, True), {layout.mask: 0, 0: 0}, range(layout.logits + 1))
        for all_of, mask_from, start in starts:
            cut = torch.ones_like(mask) if all_of else long[:, mask_from : mask_from + width]
            told = longer(cut, layout.logits, start, False)
            if told.equal(seen) and 0 <= start + shift <= layout.ids:
                return [start, start + shift, mask_from]
        return None


def alike(a: Tensor, b: Tensor) -> bool:
    return a.allclose(b, rtol=1e-4, atol=1e-6)


def longer(x: Tensor, by: int, start: int, filling: Any) -> Tensor:
    """One column more, if `by` is 1: before x if it starts at 1, or behind it."""
    if not by:
        return x
    more = torch.as_tensor(filling, dtype=x.dtype).expand_as(x[:, :1])
    return torch.cat([more, x] if start else [x, more], dim=1)
