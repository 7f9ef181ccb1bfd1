"""How the judge of losses asks: somebody's function, called by the names of its parameters."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigrpo.clinic.probes import BUILT_IN, KINDS, OPTIONAL, Probe

NAMES = {  # how the parameters may be called; the first that fits counts
    "old_log_probs": r"old|(old|behavio|sampl|rollout)\w*log_?p\w*|\w*log_?p\w*_old",
    "completion_mask": r"(.*_)?ma?sk",
    "rewards": r"(.*_)?(rewards?|scores?)",
    "advantages": r"(.*_)?adv(s|antages?)?|A",
    "group_size": r"group_size|num_generations|G",
    "log_probs": r"(?!ref)(.*_)?(log_?p\w*|lps?|new)",
}
KNOWN = {*BUILT_IN, "max_length", *OPTIONAL}
REWARD = {"scale", "baseline", "eps"}  # options of `group_advantages`
NEEDS = {"kl_weight": "ref_log_probs", "estimator": "ref_log_probs",
         "kl_correction": "ref_log_probs", "entropy_weight": "entropy"}  # fmt: skip

Answer = list[Tensor] | str
"""A value, and its gradients with respect to log_probs and entropy; or what was raised."""


class Unjudged(Exception):
    """Why there is no verdict, in one sentence."""


class Report(NamedTuple):
    """What the judge found. `passed` is None where it couldn't judge; printed, it is the text."""

    passed: bool | None
    mistakes: list[str]
    cautions: list[str]
    text: str

    def __str__(self) -> str:
        return self.text


def unjudged(why: object) -> Report:
    return Report(None, [], [], f"Not judged: {why}.")


def judge_file(target: str, built_in: dict[str, Any], seconds: float = 60) -> Report:
    """Judge in a process of its own, which may hang, print without end, or end Python."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        root = str(Path(__file__).resolve().parents[2])
        python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-B", "-m", "minigrpo.clinic", "child", str(path)]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        env = {**os.environ, "PYTHONPATH": python_path}
        command.append(json.dumps([target, built_in]))
        try:
            ran = subprocess.run(command, timeout=seconds, env=env, **quiet)
        except subprocess.TimeoutExpired:
            return unjudged(f"it didn't finish within {seconds:g} seconds (--seconds)")
        if not path.is_file():
            return unjudged(f"the file ended Python with exit code {ran.returncode}")
        return Report(*json.loads(path.read_text("utf-8")))


def role(parameter: inspect.Parameter) -> str | None:
    """What is passed as this parameter, if its name tells. A number by default is an option."""
    name, usual = parameter.name, parameter.default
    if name in KNOWN or not (usual is None or usual is parameter.empty):
        return None
    return next((to for to, names in NAMES.items() if re.fullmatch(names, name)), None)


class Judged:
    """A function under judgement: what it is, which options it has, and how it is called."""

    def __init__(self, function: Callable) -> None:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            kind = type(function).__name__
            raise Unjudged(f"expected a function with a signature, got {kind}") from None
        self.function, self.mask, self.connected = function, torch.bool, False
        self.dtype = torch.float64
        starred = {p.kind for p in parameters}
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        options = KNOWN if inspect.Parameter.VAR_KEYWORD in starred else {p.name for p in named}
        self.options = {k for k in KNOWN & options if NEEDS.get(k, k) in options}
        self.roles = {p.name: to for p in named if (to := role(p))}
        roles = set(self.roles.values())
        rest = [p.name for p in named if p.default is p.empty]
        rest = [name for name in rest if name not in KNOWN | self.roles.keys()]
        if inspect.Parameter.VAR_POSITIONAL in starred and not roles and not rest:
            rest = ["*"] * 4
        self.kind = self._kind(roles, len(rest))
        self.options -= {"loss": REWARD, "advantages": KNOWN - REWARD}.get(self.kind, set())
        self.named = self.options & {p.name for p in named}  # not only by **options
        missing = [role for role in KINDS[self.kind] if role not in roles]
        twice = len(roles) < len(self.roles)
        if len(rest) != len(missing) or roles - set(KINDS[self.kind]) or twice:
            raise Unjudged(
                "expected the parameters (log_probs, old_log_probs, advantages, completion_mask), "
                "or (rewards, group_size), or rewards and group_size in place of advantages, then "
                f"options by name; found ({', '.join(p.name for p in parameters)}); --help shows "
                "how to wrap such a function"
            )
        self.positional = missing if "*" in rest else []
        self.roles |= {} if self.positional else dict(zip(rest, missing))

    @staticmethod
    def _kind(roles: set[str], rest: int) -> str:
        if roles & {"rewards", "group_size"} and "advantages" not in roles:
            return "rewards" if roles & {"log_probs", "completion_mask"} else "advantages"
        return "advantages" if not roles and rest == 2 else "loss"

    def __call__(self, inputs: dict[str, Any], settings: dict[str, Any]) -> Any:
        types = {"completion_mask": self.mask}
        arguments = {
            k: v.to(types.get(k, self.dtype)) if isinstance(v, Tensor) else v
            for k, v in inputs.items()
        }
        before = {k: v.detach().clone() for k, v in arguments.items() if isinstance(v, Tensor)}
        named = {k: v for k, v in settings.items() if k in self.options}
        named |= {k: arguments[k] for k in OPTIONAL if k in self.options and k in arguments}
        named |= {name: arguments[role] for name, role in self.roles.items()}
        value = self.function(*(arguments[role] for role in self.positional), **named)
        for name, x in before.items():
            if not torch.equal(arguments[name].nan_to_num(), x.nan_to_num()):
                raise Unjudged(f"it changes its input {name} in place")
        return value


def first(value: Any) -> Any:
    """The loss of a function that returns a tuple."""
    return value[0] if isinstance(value, tuple) and value else value


def answer(call: Callable[[dict, dict], Any], probe: Probe, settings: dict[str, Any]) -> Answer:
    """Value and gradients, zeros where there is none; or the error that was raised."""
    arguments = {k: v.clone() if isinstance(v, Tensor) else v for k, v in probe.inputs.items()}
    leaves = [arguments[k].requires_grad_() for k in ("log_probs", "entropy") if k in arguments]
    gradients: Any = [None] * len(leaves)
    try:
        with open(os.devnull, "w") as no, contextlib.redirect_stdout(no), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = first(call(arguments, settings))
            if leaves and isinstance(value, Tensor) and value.requires_grad:
                gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    except Unjudged:
        raise
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0].strip(": ")
    _check(value, probe)
    if isinstance(call, Judged):
        call.connected |= value.requires_grad or not leaves
    value = value.detach().double()
    pairs = zip(gradients, leaves)
    slopes = [torch.zeros_like(x) if g is None else g.double() for g, x in pairs]
    return [value.reshape(()) if leaves else value, *slopes]


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
    numbers = torch.cat([x.flatten() for x in right])
    atol = 1e-7 + 1e-6 * numbers[numbers.isfinite()].abs().sum().item()
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=atol, equal_nan=True)
        for a, b in zip(reply, right)
    )


def shown(reply: Answer) -> str:
    """An answer in words."""
    if isinstance(reply, str):
        return f"an error ({reply})"
    value, *gradients = [[float(f"{x:.5g}") + 0.0 for x in t.flatten().tolist()] for t in reply]
    if not gradients:
        return str(value)
    words = f"{value[0]}, gradient {gradients[0]}"
    return words + (f", of the entropy {gradients[1]}" if any(gradients[1]) else "")
