"""Is this loss right? Anyone's loss, against TRL's stored answers and the named mistakes.

Every mistake in `mistakes.md` is planted in a copy of the course's objective. A loss is asked a few
cases that one can do by hand; where it answers wrongly, it is told which copies answer the same.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigrpo import objective
from minigrpo.clinic.trl_answers import SCALES, VARIANTS, Answers, translated
from minigrpo.study.mistakes import replaced


class Mistake(NamedTuple):
    name: str
    sentence: str  # what a reader is told
    function: str  # of minigrpo.objective
    line: str
    instead: str


ENTRY = re.compile(r"## (\w+)\n\n(.+)\n\n    (\w+)\n    - (.+)\n    \+ (.+)\n")
MISTAKES = [
    Mistake(*entry)
    for entry in ENTRY.findall(Path(__file__).with_name("mistakes.md").read_text("utf-8"))
]
ADVANTAGES = ("group_advantages", "equal_groups")  # where the mistakes about advantages are
CAUTIONS = {  # right on ordinary inputs, as TRL's own code is: the name, and how it is seen
    "mask_by_multiplication": "with NaN under the mask, loss or gradient is no longer finite",
    "advantages_not_detached": "a gradient reaches advantages that carry a graph",
    "old_log_probs_not_detached": "a gradient reaches old log-probs that carry a graph",
    "equal_rewards_not_exactly_zero": "three rewards of 0.1 have advantages that aren't exactly 0",
    "group_of_one_accepted": "groups of one are answered, and nothing is raised",
}
ROLES = {  # what a function is called with, and how its parameters may be named
    "log_probs": "log_probs logprobs logps new_log_probs new_logps per_token_logps new",
    "old_log_probs": "old_log_probs old_logprobs old_logps old_per_token_logps old",
    "rewards": "rewards reward scores",
    "advantages": "advantages advantage adv A",
    "group_size": "group_size num_generations G",
    "completion_mask": "completion_mask mask loss_mask response_mask",
}
KINDS = {
    "loss": ("log_probs", "old_log_probs", "advantages", "completion_mask"),
    "advantages": ("rewards", "group_size"),
    "rewards": ("log_probs", "old_log_probs", "rewards", "group_size", "completion_mask"),
}
OPTIONAL = ("ref_log_probs", "entropy")
BUILT_IN: dict[str, tuple] = {  # an option that a function doesn't have is found out
    "how": ("sequence_mean", "token_mean", "constant"),
    "surrogate": ("clip", "cispo"),
    "level": ("token", "geometric", "sequence"),
    "clip": ((0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (0.1, 0.1), (0.3, 0.3), (0.2, 4.0), (0.2, 5.0)),
    "scale": ("group", "none"),
    "baseline": ("mean", "leave_one_out"),
    "eps": (1e-4, 1e-8, 1e-6, 1e-5, 0.0),
    "kl_weight": (0.0, 0.04, 0.1, 0.01, 0.02, 0.05, 0.001, 1.0),
    "estimator": ("k3", "k2"),
    "kl_correction": (False, True),
    "entropy_weight": (0.0, 0.01, 0.1, 0.001, 0.05, 1.0),
}
UNSEEN = (
    "What no judge of a loss can see: how the log-probs were scored (the shift by one, the "
    "temperature), what the mask holds, the sampler, the reward, and the optimizer."
)


class Unjudged(Exception):
    """Why there is no verdict, in one sentence."""


def _also(name: str, *lines: tuple[str, str, str]) -> list[Mistake]:
    """Another form of a mistake, in several lines: (function, line, instead)."""
    sentence = next(m.sentence for m in MISTAKES if m.name == name)
    return [Mistake(name, sentence, *line) for line in lines]


EQUAL = "equal = equal_groups(rewards, group_size)  # (P,)"
RETURN = 'return (rewards if baseline == "none" else advantages).to(dtype)'
ROOT = "(advantages.square().sum(dim=1, keepdim=True) / (group_size - 1)).sqrt()"
PADDING_SEEN = (
    ("_real", "values = _unmasked(log_probs, mask)", "values = log_probs"),
    ("policy_ratio", "return log_ratio.exp()", "return (log_probs - old_log_probs).exp()"),
)
LINES = {m.name: (m.function, m.line, m.instead) for m in MISTAKES}
ALSO = [
    _also(  # and back again
        "groups_mix_prompts",
        ("group_advantages", EQUAL, "rewards = rewards.view(group_size, -1).T.flatten(); " + EQUAL),
        (
            "group_advantages",
            RETURN,
            "return advantages.view(-1, group_size).T.flatten().to(dtype)",
        ),
    ),
    _also(  # and the std around that mean
        "mean_over_the_batch",
        LINES["mean_over_the_batch"],
        (
            "group_advantages",
            LINES["population_std"][1],
            f"advantages = advantages / ({ROOT} + eps)",
        ),
    ),
    _also(  # with a gradient for the padding
        "mask_in_the_denominator_only", LINES["mask_in_the_denominator_only"], *PADDING_SEEN
    ),
    _also(  # without any mask
        "mean_over_the_padding",
        (*LINES["mean_over_the_padding"][:2], "return per_token.mean()"),
        *PADDING_SEEN,
    ),
]


class Report(NamedTuple):
    """What the judge found. `passed` is None where it couldn't judge; `print` shows the text."""

    passed: bool | None
    mistakes: list[str]
    cautions: list[str]
    text: str

    def __str__(self) -> str:
        return self.text


# ----- the cases


class Probe(NamedTuple):
    what: str
    inputs: dict[str, Any]
    settings: dict[str, Any]


def probe(ratios, advantages, mask=None, *, new=-1.0, kl=1.0, first=False, **settings) -> Probe:
    """Where all log-probs are `new`, and the ratio to the reference policy is `kl`."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    real = torch.ones_like(ratio) if mask is None else torch.tensor(mask, dtype=torch.float64)
    log_probs = new * real
    words = f"ratios {ratios}, advantages {advantages}" + (f", mask {mask}" if mask else "")
    words += f", log-probs {new:g}" * (settings.get("surrogate") == "cispo")
    words += f", {kl:g} times as likely as under the reference" * ("kl_weight" in settings)
    words += ", no old log-probs" * first
    inputs = {
        "log_probs": log_probs,
        "old_log_probs": None if first else (log_probs - ratio.log()) * real,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "completion_mask": real,
        "ref_log_probs": (log_probs - torch.tensor(kl).double().log()) * real,
        "entropy": real.clone(),
    }
    return Probe(words, inputs, settings)


RAGGED = [[1, 0, 0, 0], [1, 1, 1, 1]]
UNEVEN = ([[1.1, 1, 1, 1], [0.9, 1.05, 1.1, 1]], [1, -2], RAGGED)
WIDE = ([[1.1, 1.1, 1, 1]], [1], [[1, 1, 0, 0]])
CISPO = {"surrogate": "cispo", "clip": (1.0, 1.0)}
LOSS_PROBES = [
    *(probe([[r]], [a]) for r, a in ((1.1, 1), (0.5, 1), (3, 1), (1.5, -1), (0.5, -1))),
    probe([[1.1, 0.9]], [1]),
    probe([[1]], [1], first=True),
    *(probe([[r]], [a], clip=(0.2, 0.28)) for r, a in ((2, 1), (0.1, -1))),
    probe([[1, 1], [1, 1]], [1, -1]),
    probe(*UNEVEN),
    probe(*UNEVEN, how="token_mean"),
    probe(*UNEVEN, how="constant", max_length=5),
    probe([[1, 1], [1, 1]], [1, 1], [[1, 1], [0, 0]]),
    probe(*WIDE, level="geometric"),
    probe(*WIDE, level="sequence"),
    probe([[1]], [1], new=-3.0, **CISPO),
    probe([[9]], [1], new=-3.0, **CISPO),
    *(probe([[1]], [0], kl=kl, kl_weight=1.0) for kl in (2.0, 1.0, 0.5)),
    *(probe([[1]], [0], kl=2.0, kl_weight=1.0, estimator=name) for name in ("k1", "k2")),
    probe([[3]], [0], kl=2.0, kl_weight=1.0, estimator="k1", kl_correction=True),
    probe(*UNEVEN, kl=2.0, kl_weight=0.1, how="token_mean"),
    probe([[1]], [1], entropy_weight=0.5),
]


def rewarded(rewards: list[float], size: int, **settings: Any) -> Probe:
    inputs = {"rewards": torch.tensor(rewards, dtype=torch.float64), "group_size": size}
    return Probe(f"rewards {rewards} in groups of {size}", inputs, settings)


ADVANTAGE_PROBES = [
    rewarded([1, 0], 2),
    rewarded([10, 0], 2),
    rewarded([1, 0], 2, eps=0.5),
    rewarded([10, 8, 1, 0], 2),
    rewarded([100, 0, 1, 0], 2),
    rewarded([2, 0, 1, 1], 2),
    rewarded([3, 1, 0, 5, 5, 2], 3),
    rewarded([10, 8, 1, 0], 2, scale="batch"),
    rewarded([2, 0, 1, 1], 2, scale="none"),
    rewarded([3, 1, 0, 5, 5, 2], 3, scale="none", baseline="leave_one_out"),
]


def both_signs(one: Probe) -> Probe:
    """Every row twice, rewarded with plus and minus its advantage, in groups of two."""
    twice = {k: v if v is None else v.repeat_interleave(2, dim=0) for k, v in one.inputs.items()}
    A = twice.pop("advantages")
    sign = torch.tensor([1.0, -1.0]).double().repeat(len(A) // 2)
    words = f"{one.what}, every row twice, the copy with the opposite reward"
    return Probe(words, {**twice, "rewards": A * sign, "group_size": 2}, one.settings)


def as_loss(one: Probe) -> Probe:
    """The rewards of a probe of advantages, each for a row of one token."""
    rewards = one.inputs["rewards"]
    rows = probe([[1 + 0.01 * i] for i in range(len(rewards))], rewards.tolist())
    del rows.inputs["advantages"]
    return Probe(f"{one.what}, one token each", {**rows.inputs, **one.inputs}, one.settings)


PROBES = {
    "loss": LOSS_PROBES,
    "advantages": ADVANTAGE_PROBES,
    "rewards": [both_signs(one) for one in LOSS_PROBES] + [as_loss(p) for p in ADVANTAGE_PROBES],
}

# ----- asking

Answer = list[Tensor] | str
"""Value, and gradients with respect to log_probs and entropy; or what was raised."""


class Judged:
    """Somebody's function, called by the names of its parameters."""

    def __init__(self, function: Callable) -> None:
        self.function, self.has_gradient, self.mask = function, False, torch.bool
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise Unjudged(f"expected a function, got {type(function).__name__}") from None
        known = {*BUILT_IN, "max_length", *OPTIONAL}
        kinds = {p.kind for p in parameters}
        self.any_option = inspect.Parameter.VAR_KEYWORD in kinds
        by_name = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.options = known if self.any_option else known & {p.name for p in by_name}
        others = [p for p in by_name if p.name not in known]
        alias = {name: role for role, names in ROLES.items() for name in names.split()}
        self.roles = {p.name: alias[p.name] for p in others if p.name in alias}
        rest = [p.name for p in others if p.name not in alias and p.default is p.empty]
        seen = set(self.roles.values())
        if inspect.Parameter.VAR_POSITIONAL in kinds and not seen | set(rest):
            rest = ["*"] * 4
        if seen & {"rewards", "group_size"} and "advantages" not in seen:
            self.kind = "rewards" if seen & {"log_probs", "completion_mask"} else "advantages"
        else:
            self.kind = "advantages" if not seen and len(rest) == 2 else "loss"
        missing = [role for role in KINDS[self.kind] if role not in seen]
        if len(rest) != len(missing) or seen - set(KINDS[self.kind]):
            shown = ", ".join(p.name for p in parameters)
            raise Unjudged(
                "expected the parameters (log_probs, old_log_probs, advantages, completion_mask), or "
                "(rewards, group_size), or rewards and group_size in place of advantages, and "
                f"options by name; found ({shown}); --help shows how to wrap such a function"
            )
        self.positional = missing if "*" in rest else []
        self.roles |= {} if self.positional else dict(zip(rest, missing))
        if not {"ref_log_probs"} & self.options:
            self.options = self.options - {"kl_weight", "estimator", "kl_correction"}
        if "entropy" not in self.options:
            self.options = self.options - {"entropy_weight"}

    def __call__(self, inputs: dict[str, Any], settings: dict[str, Any]) -> Any:
        inputs = {**inputs}
        if "completion_mask" in inputs:
            inputs["completion_mask"] = inputs["completion_mask"].to(self.mask)
        named = {k: v for k, v in settings.items() if k in self.options}
        named |= {k: inputs[k] for k in OPTIONAL if k in self.options and k in inputs}
        named |= {name: inputs[role] for name, role in self.roles.items()}
        return self.function(*(inputs[role] for role in self.positional), **named)


@cache
def course(*mistakes: Mistake) -> Callable[[dict, dict], Any]:
    """The course's objective with these mistakes, called as a `Judged`. ValueError: they collide."""
    source = inspect.getsource(objective)
    for m in mistakes:
        old = inspect.getsource(getattr(objective, m.function))
        at = source.index(f"def {m.function}(")
        end = re.compile(r"\n(?=\S)(?!\))").search(source, at)
        old = source[at : end.end() if end else None]
        source = source[:at] + replaced(old, m.instead, m.line) + source[at + len(old) :]
    names: dict[str, Any] = {"__name__": "minigrpo.objective with mistakes"}
    exec(compile(source, "<objective>", "exec"), names)

    def call(inputs: dict[str, Any], settings: dict[str, Any]) -> Any:
        own = {k: v for k, v in settings.items() if k in ("scale", "baseline", "eps")}
        settings = {k: v for k, v in settings.items() if k not in own}
        inputs = {**inputs}
        if "rewards" in inputs:
            A = names["group_advantages"](inputs.pop("rewards"), inputs.pop("group_size"), **own)
            if "log_probs" not in inputs:
                return A
            inputs["advantages"] = A
        return names["grpo_loss"](**inputs, **settings)

    return call


def answer(call: Callable[[dict, dict], Any], one: Probe, settings: dict[str, Any]) -> Answer:
    """Value and gradients, zeros where there is none; or the error that was raised."""
    given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in one.inputs.items()}
    leaves = [given[k].requires_grad_() for k in ("log_probs", "entropy") if k in given]
    gradients: Any = [None] * len(leaves)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            value = call(given, settings)
            value = value[0] if isinstance(value, tuple) and value else value
            if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad and leaves:
                gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    for name, before in one.inputs.items():
        if isinstance(before, Tensor) and not torch.equal(
            given[name].nan_to_num(), before.nan_to_num()
        ):
            raise Unjudged(f"it changes its input {name} in place")
    if not isinstance(value, Tensor):
        raise Unjudged(
            f"expected a tensor, or a tuple that begins with one; it returns {value!r:.60}"
        )
    shape = tuple(value.shape)
    if not leaves and shape != tuple(one.inputs["rewards"].shape):
        raise Unjudged(f"expected advantages of shape (N,), the rewards'; it returns {shape}")
    if leaves and value.numel() != 1:
        raise Unjudged(f"expected a loss that is one number, shape (); it returns shape {shape}")
    if isinstance(call, Judged):
        call.has_gradient |= value.requires_grad or not leaves
    value = value.detach().double()
    pairs = zip(gradients, leaves)
    grads = [torch.zeros_like(x) if g is None else g.double() for g, x in pairs]
    return [value.reshape(()) if leaves else value, *grads]


@cache
def says(mistakes: tuple[Mistake, ...], kind: str, number: int, *settings: tuple) -> Answer:
    """What the course's objective with these mistakes says of a probe."""
    return answer(course(*mistakes), PROBES[kind][number], dict(settings))


def same(one: Answer, other: Answer) -> bool:
    """Equal up to rounding; two errors are alike."""
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and isinstance(other, str)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True)
        for a, b in zip(one, other)
    )


def shown(one: Answer) -> str:
    """An answer in words."""
    if isinstance(one, str):
        return f"an error ({one})"
    value, *gradients = [[round(x, 4) + 0.0 for x in t.flatten().tolist()] for t in one]
    if not gradients:
        return str(value)
    words = f"{value[0]}, gradient {gradients[0]}"
    return words + (f", of the entropy {gradients[1]}" if any(gradients[1]) else "")


# ----- the verdict


class _Case:
    """One judgement: the probes, what was answered, and what the course's objective says."""

    def __init__(self, judged: Judged, given: dict[str, Any]) -> None:
        self.judged, self.given = judged, given
        self.relevant = [
            tuple(planted)
            for planted in (*([m] for m in MISTAKES), *ALSO)
            if judged.kind == "rewards"
            or (planted[0].function in ADVANTAGES) == (judged.kind == "advantages")
        ]
        self.assumed = dict(given)
        probes, self.uncovered = [], {}
        for mask in (torch.bool, torch.long, torch.float64):
            judged.mask = mask
            first = answer(judged, PROBES[judged.kind][0], self.settings(PROBES[judged.kind][0]))
            if not isinstance(first, str):
                break
        else:
            judged.mask = torch.bool
        got = []
        for one in PROBES[judged.kind]:
            reply = answer(judged, one, self.settings(one))
            options = [k for k in one.settings if k in judged.options and k not in given]
            first_update = "old_log_probs" in one.inputs and one.inputs["old_log_probs"] is None
            if isinstance(reply, str) and (options or first_update):
                name = (
                    "old_log_probs=None"
                    if first_update
                    else f"{options[0]}={one.settings[options[0]]!r}"
                )
                self.uncovered[name] = reply
            else:
                probes.append(one)
                got.append(reply)
        self.probes, self.got = probes, got
        numbers = {id(p): i for i, p in enumerate(PROBES[judged.kind])}
        self.numbered = [(numbers[id(p)], p) for p in probes]
        if all(isinstance(reply, str) for reply in got):
            raise Unjudged(f"it raises {got[0]}" if got else "it raises an error in every case")
        if not judged.has_gradient:
            raise Unjudged("the loss has no gradient: nothing connects it with log_probs")
        for one, before in list(zip(probes, got))[:4]:
            again = answer(judged, one, self.settings(one))
            if not same(again, before):
                raise Unjudged(
                    f"two calls with the same inputs differ ({shown(before)}, then {shown(again)}): "
                    "it is random, or keeps something between calls"
                )

    def settings(self, one: Probe) -> dict[str, Any]:
        """Those of a probe that the function can be given, and what is known of the others."""
        asked = {k: v for k, v in {**DEFAULTS, **one.settings}.items() if k in self.judged.options}
        return {**asked, **self.assumed}

    def answers(self, *mistakes: Mistake) -> list[Answer]:
        """What the course's objective with these mistakes says of every probe."""
        kind = self.judged.kind
        return [says(mistakes, kind, i, *self.settings(p).items()) for i, p in self.numbered]

    def agreement(self, **more: Any) -> int:
        before, self.assumed = self.assumed, {**self.assumed, **more}
        if self.assumed.get("how") == "constant" and "max_length" not in self.judged.options:
            self.assumed.setdefault("max_length", self.budget())
        flipped = [got if isinstance(got, str) else [-x for x in got] for got in self.got]
        pairs = zip(self.got, flipped, self.answers())  # a wrong sign hides nothing else
        agree = sum(same(got, says) or same(minus, says) for got, minus, says in pairs)
        self.assumed = before
        return agree

    def budget(self) -> int:
        """The max_length that is built in: how much smaller the gradients are than with 1."""
        self.assumed["max_length"] = 1
        sizes = [
            (mine[1].abs().sum() / got[1].abs().sum()).item()
            for mine, got in zip(self.answers(), self.got)
            if not isinstance(got, str) and got[1].abs().sum() > 0
        ]
        del self.assumed["max_length"]
        sizes = [round(s) for s in sizes if abs(s - round(s)) < 1e-4 and s > 0.5]
        return max(set(sizes), key=sizes.count) if sizes else 1

    def fit(self) -> None:
        """Find out what is built in: one option after the other, twice."""
        own, loss = {"scale", "baseline", "eps"}, self.judged.kind != "advantages"
        wanted = {"how", "surrogate", "level", "clip"} if loss else set()
        wanted |= own if self.judged.kind != "loss" else set()
        wanted |= (
            {"kl_weight", "estimator", "kl_correction"}
            if "ref_log_probs" in self.judged.options
            else set()
        )
        wanted |= {"entropy_weight"} if "entropy" in self.judged.options else set()
        wanted -= self.judged.options | self.given.keys()
        self.found_out = [option for option in BUILT_IN if option in wanted]
        for _ in range(2):
            for option in self.found_out:
                values = [
                    v
                    for v in BUILT_IN[option]
                    if not (
                        option == "scale" and v != "none" and self.assumed.get("baseline") == "none"
                    )
                ]
                best = max(values, key=lambda v: self.agreement(**{option: v}))
                self.assumed[option] = best
                if (
                    option == "how"
                    and best == "constant"
                    and "max_length" not in self.judged.options
                    and "max_length" not in self.given
                ):
                    self.assumed["max_length"] = self.budget()
                elif option == "how":
                    if "max_length" not in self.given:
                        self.assumed.pop("max_length", None)

    def best(self) -> tuple:
        """`explain` under what was found out; if that leaves something open, under the defaults."""
        fitted, tried = dict(self.assumed), []
        turned = [option for option in ("how", "scale") if option in self.found_out]
        plain = {**fitted, **{option: BUILT_IN[option][0] for option in self.found_out}}
        for assumed in [fitted, *({**plain, o: v} for o in turned for v in BUILT_IN[o])]:
            self.assumed = assumed
            if assumed.get("how") == "constant" and "max_length" not in assumed:
                assumed["max_length"] = self.budget()
            tried.append((*self.explain(), assumed, self.right))
            if tried[-1][2] == len(tried[-1][1]):
                break
        return max(tried, key=lambda t: t[2] - len(t[1]))

    def explain(self) -> tuple[list[tuple[Mistake, ...]], list[int], int]:
        """The mistakes with which the course's objective answers the same, as few as possible.

        With them, where it answers wrongly, and how many of these the mistakes explain.
        """
        right = self.answers()
        self.right = right
        wrong = [i for i, got in enumerate(self.got) if not same(got, right[i])]
        named: list[tuple[Mistake, ...]] = []
        explained = 0
        while wrong and explained < len(wrong) and len(named) < 4:
            best = (explained, 0, None)
            for m in self.relevant:
                if m[0].name in [n[0].name for n in named]:
                    continue
                try:
                    says = self.answers(*sum(named, ()), *m)
                except (ValueError, SyntaxError):
                    continue
                hits = sum(same(self.got[i], says[i]) for i in wrong)
                spoilt = sum(
                    not same(says[i], right[i]) for i in range(len(right)) if i not in wrong
                )
                if hits > explained and (hits, -spoilt) > (best[0], best[1] if best[2] else -99):
                    best = (hits, -spoilt, m)
            if best[2] is None:
                break
            explained = best[0]
            named.append(best[2])
        return named, wrong, explained

    def changed(self, one: Probe, **inputs: Any) -> Answer:
        return answer(
            self.judged, one._replace(inputs={**one.inputs, **inputs}), self.settings(one)
        )

    def under_the_mask(self, garbage: float) -> Answer:
        """What it answers with garbage where the mask is 0."""
        one = next(p for p in PROBES[self.judged.kind] if (p.inputs["completion_mask"] == 0).any())
        real = one.inputs["completion_mask"].bool()
        names = ("log_probs", "old_log_probs", *OPTIONAL)
        dirty = {
            k: one.inputs[k].masked_fill(~real, garbage * (i + 1)) for i, k in enumerate(names)
        }
        return self.changed(one, **dirty)

    def leaks(self, name: str) -> bool:
        """Whether a gradient reaches this input."""
        one = next(p for p in self.probes if p.inputs.get("old_log_probs") is not None)
        graph = one.inputs[name].clone().requires_grad_()
        inputs = {
            **one.inputs,
            "log_probs": one.inputs["log_probs"].clone().requires_grad_(),
            name: graph,
        }
        try:
            value = self.judged(inputs, self.settings(one))
            value = value[0] if isinstance(value, tuple) else value
            (gradient,) = torch.autograd.grad(value.sum(), [graph], allow_unused=True)
        except Exception:
            return False
        return gradient is not None and bool((gradient != 0).any())

    def cautions(self) -> list[str]:
        found = []
        kind = self.judged.kind
        if kind != "advantages":
            clean, dirty = self.under_the_mask(0.0), self.under_the_mask(-0.3)
            nan = self.under_the_mask(float("nan"))
            finite = not isinstance(nan, str) and all(x.isfinite().all() for x in nan)
            if not isinstance(clean, str) and same(clean, dirty) and not finite:
                found.append("mask_by_multiplication")
            name = "advantages" if kind == "loss" else "rewards"
            found += ["advantages_not_detached"] * self.leaks(name)
            found += ["old_log_probs_not_detached"] * self.leaks("old_log_probs")
        if kind != "loss":
            one = self.probes[0]
            three = {
                k: v[:1].repeat_interleave(3, dim=0)
                for k, v in one.inputs.items()
                if isinstance(v, Tensor)
            }
            three |= {"rewards": torch.full((3,), 0.1, dtype=torch.float64), "group_size": 3}
            equal = self.changed(one, **three)
            if not isinstance(equal, str) and 0 < equal[0].abs().max() < 1e-3:
                found.append("equal_rewards_not_exactly_zero")
            alone = self.changed(one, group_size=1)
            found += ["group_of_one_accepted"] * (not isinstance(alone, str))
        return found

    def trl(self) -> tuple[int, int, list[tuple[str, str, str]]]:
        """How many of TRL's answers were compared, of how many, and where it differs."""
        stored, compared, total, off = Answers(), 0, 0, []
        known = {**DEFAULTS, **self.assumed}

        def fits(settings):
            return all(
                k in self.judged.options and k not in self.given or known.get(k) == v
                for k, v in settings.items()
            )

        if self.judged.kind == "advantages":
            for scale in SCALES:
                for (rewards, size), theirs in zip(stored.reward_cases, stored.advantages(scale)):
                    total += 1
                    one = Probe(
                        "", {"rewards": rewards, "group_size": size}, {"scale": scale, "eps": 1e-4}
                    )
                    if fits(one.settings):
                        compared += 1
                        got = answer(self.judged, one, self.settings(one))
                        if not same(got, [theirs]):
                            off.append(
                                (
                                    f"rewards {rewards.tolist()} in groups of {size}",
                                    shown([theirs]),
                                    shown(got),
                                )
                            )
            return compared, total, off
        for variant, words in VARIANTS.items():
            settings = {k: v for k, v in translated(**words).items() if v is not None}
            for case, (loss, gradient, of_entropy, _) in zip(stored.cases, stored.losses(variant)):
                total += 1
                if (
                    self.judged.kind != "loss"
                    or not fits(settings)
                    or case.old_log_probs is None
                    and "old_log_probs=None" in self.uncovered
                ):
                    continue
                compared += 1
                inputs = {**case._asdict()}
                inputs["completion_mask"] = inputs.pop("mask")
                one = Probe(variant, inputs, settings)
                got = answer(self.judged, one, self.settings(one))
                theirs = [
                    loss,
                    gradient,
                    torch.zeros_like(gradient) if of_entropy is None else of_entropy,
                ]
                if not same(got, theirs):
                    off.append(
                        (
                            f"TRL's {variant} with {tuple(gradient.shape)} tokens",
                            shown(theirs),
                            shown(got),
                        )
                    )
        return compared, total, off


DEFAULTS = {
    "how": "sequence_mean",
    "surrogate": "clip",
    "level": "token",
    "clip": (0.2, 0.2),
    "scale": "group",
    "baseline": "mean",
    "eps": 1e-4,
    "kl_weight": 0.0,
    "estimator": "k3",
    "kl_correction": False,
    "entropy_weight": 0.0,
}


def judge_loss(function: Callable | str, **given: Any) -> Report:
    """Judge a loss, or a function that makes advantages; `given` are options that are built in."""
    if isinstance(function, str):
        from minigrpo.clinic.__main__ import judge_file

        return judge_file(function, given)
    try:
        if not callable(function):
            raise Unjudged(f"expected a function, got {type(function).__name__}")
        case = _Case(Judged(function), given)
        case.fit()
        return _report(case)
    except Unjudged as error:
        return Report(None, [], [], f"Not judged: {error}.")


def _report(case: _Case) -> Report:
    judged = case.judged
    best = case.best()
    named, wrong, explained, case.assumed, case.right = best
    compared, total, off = case.trl()
    cautions = case.cautions()
    lines, mistakes = [], [m[0].name for m in named]
    by_name = {m.name: m for m in MISTAKES}
    if wrong and explained < len(wrong) / 2:
        named, mistakes = [], []
    for m in named:
        says, m = case.answers(*m), m[0]
        own = [i for i in wrong if not same(says[i], case.right[i])]
        own = [i for i in own if same(says[i], case.got[i])] or own or wrong
        i = own[0]
        lines += [
            m.name,
            f"  {m.sentence}",
            f"  case      {case.probes[i].what}",
            f"  expected  {shown(case.right[i])}",
            f"  got       {shown(case.got[i])}",
        ]
    garbage = judged.kind != "advantages" and not same(
        case.under_the_mask(0.0), case.under_the_mask(-0.3)
    )
    if wrong and explained < len(wrong):
        i = wrong[0]
        mistakes.append("unnamed")
        lines += [
            "unnamed",
            "  It's wrong in a way that has no name here.",
            f"  case      {case.probes[i].what}",
            f"  expected  {shown(case.right[i])}",
            f"  got       {shown(case.got[i])}",
        ]
    elif garbage and not wrong:
        mistakes.append("unnamed")
        lines += ["unnamed", "  Loss or gradient depends on what stands under the mask."]
    elif off and not wrong:
        mistakes.append("unnamed")
        what, theirs, got = min(off, key=lambda x: len(x[0] + x[1] + x[2]))
        lines += ["unnamed", f"  {what}", f"  expected  {theirs}", f"  got       {got}"]
    for name in cautions:
        lines += [
            f"careful: {name}",
            f"  {by_name[name].sentence}",
            f"  Seen: {CAUTIONS[name]}. TRL's own code is like that, so it doesn't count as a mistake.",
        ]
    head = "Nothing wrong was found." if not mistakes else f"{len(mistakes)} mistake(s):"
    single = [m for m, *more in case.relevant if not more]
    ruled = [
        m for m in single if m.name in CAUTIONS or not all(map(same, case.answers(m), case.right))
    ]
    rest = [m.name for m in single if m not in ruled]
    lines = [head, *lines, "Covered:"]
    if compared:
        agree = compared - len(off)
        lines.append(
            f"  {agree} of {compared} answers of TRL agree, value and gradient ({total} are stored)"
        )
    lines.append(
        f"  {len(ruled)} of the {len(single)} mistakes about this kind of function would have been seen"
        + (f"; not: {', '.join(rest)}" if rest else "")
    )
    if case.found_out:
        lines.append(
            "  built in, as found out: "
            + ", ".join(
                f"{k}={v!r}"
                for k, v in case.assumed.items()
                if k in case.found_out or k == "max_length" and "how" in case.found_out
            )
        )
    for name, error in case.uncovered.items():
        lines.append(f"  not covered: {name} ({error})")
    lines.append(UNSEEN)
    return Report(not mistakes, mistakes, cautions, "\n".join(lines))
