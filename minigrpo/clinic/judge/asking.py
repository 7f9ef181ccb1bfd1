"""How the judge of losses asks: somebody's function, called by the names of its parameters."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigrpo.clinic.judge.probes import BUILT_IN, KINDS, OPTIONAL, Probe
from minigrpo.clinic.judge.report import Unjudged

LP = r"(log_?p\w*|lps?)"
OLD = r"(old|behaviou?r|sampl\w*|rollout|inference|generat\w*|prev)"
INPUTS = {  # how inputs are called, here and elsewhere; the first that fits counts
    "ref_log_probs": rf"(\w+_)?ref(erence)?_?(\w*_)?{LP}|\w*{LP}_ref",
    "old_log_probs": rf"old|(\w+_)?{OLD}_?(\w*_)?{LP}|\w*{LP}_old",
    "completion_mask": r"(.*_)?ma?sks?",
    "rewards": r"(.*_)?(rewards?|scores?)",
    "advantages": r"(.*_)?adv(s|antages?)?|A",
    "group_size": r"group_size|num_generations|n_samples_per_prompt|G",
    "log_probs": rf"(.*_)?({LP}|new)",
}
CLIP = r"(clip_?(range|ratio|eps|epsilon)?|eps(ilon)?(_clip)?)"
OPTIONS = {  # and options: those with a number by default
    "kl_weight": r"beta|kl_(beta|weight|ctl|(loss_|penalty_)?coeff?)",
    "entropy_weight": r"ent(ropy)?_(weight|beta|bonus|coeff?)",
    "clip low": rf"{CLIP}(_low|_lower|_min)?",
    "clip high": rf"{CLIP}_(high|higher|upper|max)",
    "max_length": r"max_(completion_|response_|gen(eration)?_)?(len(gth)?|tokens)",
}
MANY = r"((num|n|total|global|batch|whole|valid)_)+"
COUNTS = {  # of a larger batch to divide by
    "whole": "whole",
    "whole tokens": rf"{MANY}(\w+_)?(tok(en)?s?|items)(_count|_in_batch)?|loss_denominator",
    "whole rows": rf"{MANY}(rows|seqs|sequences|samples|batch_size)(_in_batch)?",
}
ALSO = {"mask": "completion_mask", "num_items_in_batch": "whole tokens"}  # in --map
KNOWN = {*BUILT_IN, "max_length", *OPTIONAL}
REWARD = {"scale", "baseline", "eps"}  # options of `group_advantages`
NEEDS = {"kl_weight": "ref_log_probs", "estimator": "ref_log_probs",
         "kl_correction": "ref_log_probs", "entropy_weight": "entropy"}  # fmt: skip

FLOATS = (torch.float64, torch.float32)
MASKS = (torch.bool, torch.long, torch.float64)

Answer = list[Tensor] | str
"""A value, and its gradients with respect to log_probs and entropy; or what was raised."""


class Clock:
    """How long somebody's code has run."""

    before, since = 0.0, None

    def __enter__(self) -> None:
        self.since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.before, self.since = self.seconds(), None

    def seconds(self) -> float:
        return self.before + (time.perf_counter() - self.since if self.since else 0.0)


CLOCK = Clock()


def role(parameter: inspect.Parameter) -> str | None:
    """What is passed as this parameter, if its name tells: an input, or an option."""
    name, usual = parameter.name, parameter.default
    number = isinstance(usual, (int, float)) and not isinstance(usual, bool)
    if name in KNOWN:
        return "clip low" if name == "clip" and number else name
    if not (number or usual is None or usual is parameter.empty):
        return None
    inputs = INPUTS if usual is None else INPUTS | OPTIONS
    return fitting(OPTIONS if number else inputs | COUNTS, name)


def small(parameter: inspect.Parameter) -> bool:
    """Whether it keeps a division from 0 by default, and so is no clip."""
    return isinstance(usual := parameter.default, (int, float)) and usual <= 1e-4


def fitting(table: Mapping[str, str], name: str) -> str | None:
    """The first of a table whose pattern is the name's."""
    return next((to for to, names in table.items() if re.fullmatch(names, name)), None)


def mapped(
    names: Mapping[str, str], parameters: Iterable[str], more: Iterable[str] = ()
) -> dict[str, str]:
    """What is said with --map, theirs to ours, whichever came first."""
    known = [*INPUTS, *KNOWN, *more]
    pairs = [pair[::-1] if pair[1] in parameters else pair for pair in names.items()]
    for theirs, to in pairs:
        if theirs not in parameters:
            raise Unjudged(f"expected one of {', '.join(parameters)} in --map, got {theirs!r}")
        if to not in {*known, *OPTIONS, *COUNTS, *ALSO}:
            raise Unjudged(f"expected one of {', '.join(known)}, got {to!r}")
    return {theirs: ALSO.get(to, to) for theirs, to in pairs}


def roles(named: list[inspect.Parameter], names: Mapping[str, str]) -> dict[str, str]:
    """What each parameter is; of two that seem to be one thing, what is said or needed counts."""
    found = {p.name: to for p in named if (to := names.get(p.name, role(p)))}
    taken = set()
    for p in sorted(named, key=lambda p: (p.name not in names, p.default is not p.empty)):
        to = found.get(p.name)
        if to in taken and p.default is not p.empty:
            found.pop(p.name, None)
        taken.add(to)
    return found


class Judged:
    """A function under judgement: what it is, which options it has, and how it is called."""

    def __init__(self, function: Callable, names: Mapping[str, str] = {}) -> None:
        try:
            signature = inspect.signature(getattr(function, "forward", function))  # of a module
        except (TypeError, ValueError):
            kind = type(function).__name__
            raise Unjudged(f"expected a function with a signature, got {kind}") from None
        self.function, self.mask, self.connected = function, torch.bool, False
        self.per_token: bool | str = False  # whether advantages are (N, T); or "needed"
        self.dtype = torch.float64
        self.parameters, parameters = [*signature.parameters], signature.parameters.values()
        starred = {p.kind for p in parameters}
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.roles = roles(named, mapped(names, [p.name for p in named]))
        self.find_inputs(named, inspect.Parameter.VAR_POSITIONAL in starred)
        if self.kind == "loss" and not {"clip", "clip low"} & {*self.roles.values()}:
            large = [p.name for p in named if self.roles.get(p.name) == "eps" and not small(p)]
            self.roles |= dict.fromkeys(large, "clip low")
        self.find_options(inspect.Parameter.VAR_KEYWORD in starred)
        read = {*KINDS[self.kind], *self.options, *(COUNTS if self.kind != "advantages" else ())}
        used = {p for p, to in self.roles.items() if {to, to.split()[0]} & read}
        self.unused = [p.name for p in named if p.name not in used]

    def find_inputs(self, named: list[inspect.Parameter], starred: bool) -> None:
        """What kind of function it is, and which parameters are its inputs."""
        all_of = {*self.roles.values()}
        inputs = all_of & INPUTS.keys() - {*OPTIONAL}
        required = [p.name for p in named if p.default is p.empty]
        rest = [name for name in required if name not in self.roles]
        if starred and not inputs and not rest:
            rest = ["*"] * 4
        if inputs & {"rewards", "group_size"} and "advantages" not in inputs:
            self.kind = "rewards" if inputs & {"log_probs", "completion_mask"} else "advantages"
        else:
            self.kind = "advantages" if not inputs and len(rest) == 2 else "loss"
        missing = [role for role in KINDS[self.kind] if role not in inputs]
        needs = {p: NEEDS.get(self.roles[p]) for p in required if p in self.roles}
        rest += [p for p, needed in needs.items() if needed and needed not in all_of]
        twice = len(all_of) < len(self.roles)
        if len(rest) != len(missing) or inputs - {*KINDS[self.kind]} or twice:
            told = [f"{theirs} is {to}" for theirs, to in self.roles.items() if to in inputs]
            told += [f"what is {p}?" for p in rest] + [f"which is {role}?" for role in missing]
            raise Unjudged(
                "expected the parameters (log_probs, old_log_probs, advantages, completion_mask), "
                "or (rewards, group_size), or rewards and group_size in place of advantages, then "
                f"options by name; found ({', '.join(self.parameters)})"
                + f". As far as they tell, {', '.join(told)} Say --map theirs=ours, where ours may "
                "be num_items_in_batch, too; or give it a default" * bool(told)
            )
        self.positional = missing if "*" in rest else []
        self.roles |= {} if self.positional else dict(zip(rest, missing))

    def find_options(self, starred: bool) -> None:
        """Which options it has, by name or by **options."""
        parts = {to.partition(" ")[0] for to in self.roles.values()} & KNOWN
        self.by_star = KNOWN - parts if starred else set()
        self.one_clip = "clip" in parts and not {"clip", "clip high"} & {*self.roles.values()}
        theirs = {"loss": REWARD, "advantages": KNOWN - REWARD}.get(self.kind, set())
        options = (parts | self.by_star) - theirs
        self.options = {k for k in options if NEEDS.get(k, k) in options}
        self.named = self.options & parts
        self.counts = {p for p, to in self.roles.items() if to in COUNTS}

    def __call__(self, inputs: dict[str, Any], settings: dict[str, Any]) -> Any:
        types = {"completion_mask": self.mask}
        tensors = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}
        arguments = inputs | {k: v.to(types.get(k, self.dtype)) for k, v in tensors.items()}
        if self.per_token and "advantages" in arguments:
            rows = arguments["advantages"][:, None]
            arguments["advantages"] = rows.expand_as(arguments["log_probs"]).clone()
        before = {k: arguments[k].detach().clone() for k in tensors}
        if self.counts and (mask := inputs.get("completion_mask")) is not None:
            count = inputs.get("whole") or (len(mask), max(1, int(mask.sum())))
            each = map(torch.tensor, count)
            arguments |= {"whole": count, **dict(zip(("whole rows", "whole tokens"), each))}
        given = {**arguments, **settings}
        given = {k: v for k, v in given.items() if k in self.options or k not in KNOWN}
        named = {k: given[k] for k in self.by_star & given.keys()}
        if "clip" in given:
            given["clip low"], given["clip high"] = given["clip"]
        named |= {name: given[to] for name, to in self.roles.items() if to in given}
        value = self.function(*(arguments[role] for role in self.positional), **named)
        for name, x in before.items():
            if not torch.equal(arguments[name].nan_to_num(), x.nan_to_num()):
                raise Unjudged(f"it changes its input {name} in place")
        return value


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """For somebody's code: what it prints and warns of goes nowhere, and its clock runs."""
    with open(os.devnull, "w") as no, contextlib.redirect_stdout(no), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with CLOCK:
            yield


def first(value: Any) -> Any:
    """The loss of a function that returns it with others: a tuple, a dict, or a dataclass."""
    if isinstance(value, Mapping) and isinstance(value.get("loss"), Tensor):
        return value["loss"]
    if isinstance(getattr(value, "loss", None), Tensor):
        return value.loss
    value = value[0] if isinstance(value, tuple) and value else value
    return torch.as_tensor(value) if hasattr(value, "__array_interface__") else value  # of numpy


def answer(call: Callable[[dict, dict], Any], probe: Probe, settings: dict[str, Any]) -> Answer:
    """Value and gradients, zeros where there is none; or the error that was raised."""
    arguments = {k: v.clone() if isinstance(v, Tensor) else v for k, v in probe.inputs.items()}
    leaves = [arguments[k].requires_grad_() for k in ("log_probs", "entropy") if k in arguments]
    gradients: Any = [None] * len(leaves)
    theirs = isinstance(call, Judged)
    try:
        with quietly() if theirs else contextlib.nullcontext():
            value = first(call(arguments, settings))
            if leaves and isinstance(value, Tensor) and value.requires_grad:
                gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    except Unjudged:
        raise
    except (Exception, SystemExit) as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0].strip(": ")
        return words + (at_line(error, call.function) if theirs else "")
    _check(value, probe)
    if theirs:
        call.connected |= value.requires_grad or not leaves
    value = value.detach().double()
    pairs = zip(gradients, leaves)
    slopes = [torch.zeros_like(x) if g is None else g.double() for g, x in pairs]
    return [value.reshape(()) if leaves else value, *slopes]


def at_line(error: BaseException, function: Callable) -> str:
    """Where in the function's own file."""
    code = getattr(getattr(function, "forward", function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    return f", at {Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""


def _check(value: Any, probe: Probe) -> None:
    if not isinstance(value, Tensor):
        got = type(value).__name__
        raise Unjudged(f"expected a tensor, or a tuple that begins with one; it returns {got}")
    shape = tuple(value.shape)
    if "log_probs" in probe.inputs and value.numel() != 1:
        raise Unjudged(f"expected a loss that is one number, shape (); it returns shape {shape}")
    if "log_probs" not in probe.inputs and value.shape != probe.inputs["rewards"].shape:
        raise Unjudged(f"expected advantages of shape (N,), like the rewards; it returns {shape}")


def same(reply: Answer, right: Answer) -> bool:
    """Equal up to the rounding of float32; two errors are alike."""
    if isinstance(reply, str) or isinstance(right, str):
        return isinstance(reply, str) and isinstance(right, str)
    if all(map(torch.equal, reply, right)):  # bit by bit, as many are, and that is quickly seen
        return True
    numbers = torch.cat([x.flatten() for x in right])
    atol = 1e-7 + 1e-6 * numbers[numbers.isfinite()].abs().sum().item()
    near = {"rtol": 1e-5, "atol": atol, "equal_nan": True}
    return all(a.shape == b.shape and torch.allclose(a, b, **near) for a, b in zip(reply, right))


def shown(reply: Answer) -> str:
    """An answer in words."""
    if isinstance(reply, str):
        return f"an error ({reply})"
    value, *gradients = [[float(f"{x:.5g}") + 0.0 for x in t.flatten().tolist()] for t in reply]
    if not gradients:
        return str(value)
    words = f"{value[0]}, gradient {gradients[0]}"
    return words + (f", of the entropy {gradients[1]}" if any(gradients[1]) else "")
