"""Run a function on hand-placed cases and say what it really does.

An exercise is a record: the reference, other right ways, wrong answers with the sentence that a
reader who gave one is told, and the cases that tell them apart. Values are compared, and
gradients too: a loss can have the right value and teach nothing.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from minigrpo.exercises.guard import TimeIsUp, contained, describe_error, is_stub
from minigrpo.exercises.outside import notebook_data

Function = Callable[..., Any]

LONG = 20
"""Of a tensor with more entries than this, a message shows only the first that is wrong."""

SECONDS = 10.0
"""How long a function may take for all cases together."""


@dataclass(frozen=True)
class Answer:
    """A right or wrong way to solve an exercise.

    Attributes:
        name: a few words.
        function: what a reader might write.
        sentence: what to say to one who wrote this.
    """

    name: str
    function: Function
    sentence: str


@dataclass(frozen=True)
class Case:
    """Arguments to try a function on.

    Attributes:
        name: what is special about them; shown to the reader.
        arguments: in the order of the reader's parameters.
        as_given: keep the number type; otherwise floating tensors become float64.
    """

    name: str
    arguments: tuple[Any, ...]
    as_given: bool = False


@dataclass(frozen=True)
class Exercise:
    """All there is to know about one exercise.

    Attributes:
        key: notebook and number, such as "2.3".
        title: a few words.
        reference: the solution, with the reader's signature.
        imports: the import lines that the source of the reference needs.
        package: the package's own way to the same numbers (for the proof that they agree).
        others: other right ways.
        wrong: the wrong answers that are told by name.
        cases: the inputs.
        hints: from a question to almost the answer.
        why: why the reference is right, and the usual slip.
        gradient: which arguments the result must be differentiable in.
        number: whether a plain Python number is accepted instead of a tensor.
        sequence: whether a list of numbers is accepted as well.
        keywords: arguments that are passed by name; one that no case has is passed as None.
        lapses: further wrong functions, without a name; they prove that every case is needed.
        same: changed lines that make no mistake of a right way, each with the reason.
        tolerance: largest difference, relative and absolute.
    """

    key: str
    title: str
    reference: Function
    imports: tuple[str, ...]
    package: Function
    others: tuple[Answer, ...]
    wrong: tuple[Answer, ...]
    cases: tuple[Case, ...]
    hints: tuple[str, ...]
    why: str = ""
    gradient: tuple[int, ...] = ()
    number: bool = False
    sequence: bool = False
    keywords: tuple[str, ...] = ()
    lapses: tuple[Function, ...] = ()
    same: tuple[tuple[str, str], ...] = ()
    tolerance: float = 1e-6

    @cached_property
    def parameters(self) -> list[str]:
        """Of the reference, in order."""
        return [*inspect.signature(self.reference).parameters]

    @cached_property
    def wanted(self) -> list[Outcome]:
        """What the reference does."""
        return _run_all(self, self.reference)

    @cached_property
    def _known(self) -> dict[tuple[int, int], Outcome]:
        return {}

    def named(self, wrong: Answer, case: Case) -> Outcome:
        """What a named wrong answer does with a case."""
        key = id(wrong), id(case)
        if key not in self._known:
            self._known[key] = _run(self, wrong.function, case, SECONDS)
        return self._known[key]


@dataclass(frozen=True)
class Outcome:
    """What a function did with one case.

    Attributes:
        error: the exception in words, or None.
        attempted: False for a stub that raises NotImplementedError.
        stopped: whether it ran out of time or was interrupted; later cases are not tried.
        value: what it returned; a tensor without its graph, and for a list of numbers a tensor
            too, where the exercise takes one.
        graph: whether it had one.
        gradients: one per argument asked for; None where nothing flows back.
        changed: the first argument that was changed in place, and what of it; or None.
        printed: what it printed.
    """

    error: str | None = None
    attempted: bool = True
    stopped: bool = False
    value: Any = None
    graph: bool = False
    gradients: tuple[Tensor | None, ...] = ()
    changed: tuple[str, str] | None = None
    printed: str = ""


class Checked:
    """What `check` returns: call it, and you call the right function.

    Attributes:
        use: the reader's function if it is right, the reference otherwise.
        passed: whether everything is right, in a review the line too.
        status: "passed", "not passed" or "not attempted".
        attempt: what the reader wrote, for `f = check(key, f)` in a cell that is run again.
    """

    def __init__(
        self, key: str, use: Function, status: str, attempt: Function | None = None
    ) -> None:
        self.key, self.use, self.status = key, use, status
        self.passed = status == "passed"
        self.attempt = use if attempt is None else attempt

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<exercise {self.key}: {self.status}>"


def judge_exercise(exercise: Exercise, function: Function) -> tuple[str, str]:
    """Decide. Returns the status ("passed", "not passed", "not attempted") and what to print."""
    title = f"{exercise.key} ({exercise.title})"
    if told := no_function(function):
        return "not passed", f"{title}: expected your function, got {told}"
    got = _run_all(exercise, function)
    if not any(outcome.attempted for outcome in got):
        more = f'Write yours above, or ask for hint("{exercise.key}").'
        return "not attempted", f"{title}: using the course's version. {more}"

    printed = said(next((outcome.printed for outcome in got if outcome.printed), ""))
    faults = [_fault(exercise, w, g) for w, g in zip(exercise.wanted, got, strict=True)]
    if any(faults):
        explained = _explain(exercise, function, got, faults)
        return "not passed", f"{title}: not right yet. {explained}{printed}"
    changes = (g.changed for w, g in zip(exercise.wanted, got) if g.changed != w.changed)
    if (changed := next(changes, None)) is not None:
        name, what = changed
        told = f"the numbers are right, but your function {CHANGES[what].format(repr(name))}"
        return "not passed", f"{title}: {told}{printed}"
    if (name := notebook_data(function, unwrapped)) is not None:
        return "not passed", (
            f"{title}: the numbers are right, but your function reads {name!r} from the notebook "
            "instead of its arguments: elsewhere it would compute with whatever that name holds. "
            "Use the arguments, or define what you need inside the function." + printed
        )
    return "passed", f"{title}: passed, all {len(exercise.cases)} cases.{printed}"


CHANGES = {
    "content": "changes its argument {} in place, and the caller still needs it. Work on a copy.",
    "requires_grad": "switches requires_grad of its argument {}, which belongs to the caller. "
    "Take a copy: .detach().clone().",
    "grad": "leaves a gradient in its argument {}, and the caller's next backward() adds to it. "
    "Ask torch.autograd.grad, or work on a detached copy.",
}


def no_function(function: Any) -> str | None:
    """What was given instead of a function, as the end of a sentence; None for a function."""
    plain = unwrapped(function)
    if not callable(function):
        return f"{type(function).__name__}. Give check its name alone, without calling it."
    if inspect.isclass(plain):
        return f"the class {plain.__name__}. Write a function with `def`."
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        return "a coroutine, which has not begun to run when it is called. Leave out `async`."
    if inspect.isgeneratorfunction(plain):
        return "a generator, because it contains `yield`. Collect the results, and `return` them."
    return None


def said(printed: str) -> str:
    """What a function printed, short, as lines below a message."""
    lines = printed.strip().splitlines()
    kept = [line if len(line) <= 80 else line[:80] + " ..." for line in lines[:3]]
    more = ["..."] if len(lines) > 3 else []
    return "".join(f"\n  {line}" for line in ["it printed:", *kept, *more]) if lines else ""


def _explain(
    exercise: Exercise, function: Function, got: list[Outcome], faults: list[str | None]
) -> str:
    """The sentence of the named wrong answer that did the same, or the first difference."""
    at = next(i for i, fault in enumerate(faults) if fault)
    first = f"Case {exercise.cases[at].name!r}:{faults[at]}{_inputs(exercise, at)}"
    for wrong in exercise.wrong:  # case by case: most of them differ in one of the first
        same = (exercise.named(wrong, case) for case in exercise.cases)
        if all(_alike(exercise, a, b) for a, b in zip(got, same, strict=True)):
            return f"{wrong.sentence}\n{first}"
    if (name := notebook_data(function, unwrapped)) is not None:
        first += f"\nYour function reads {name!r} from the notebook. Is an argument meant?"
    name, wanted = getattr(function, "__name__", "<lambda>"), exercise.reference.__name__
    if name not in (wanted, "<lambda>"):
        first += f"\nThe exercise asks for {wanted}, you gave {name}. Is it the one you meant?"
    return f'{first}\nTry hint("{exercise.key}").'


def _inputs(exercise: Exercise, at: int) -> str:
    """The arguments of a case, one in each line, short."""
    pairs = zip(exercise.parameters, exercise.cases[at].arguments)
    lines = [f"\n    {name} = {text}" for name, value in pairs if (text := brief(value))]
    return "\n  with" + "".join(lines) if lines else ""


def brief(value: Any, room: int = 160) -> str:
    """A value in one short line; empty for what has no short form, such as a model."""
    if type(value) is Tensor:
        value = value.long() if value.dtype == torch.bool else value  # 1 and 0 are shorter
        text = _show(value, 4)
        if len(text) > room:
            text = f"{_show(value.flatten()[:5], 4)[:-1]}, ...] of shape {tuple(value.shape)}"
        return text
    if isinstance(value, list | tuple):
        ends = "[]" if isinstance(value, list) else "()"
        text = ends[0] + ", ".join(map(brief, value)) + ends[1]
    else:
        text = repr(value)
    if " at 0x" in text or isinstance(value, Tensor):
        return ""
    return text if len(text) <= room else f"{text[:room]} ..."


def _run_all(exercise: Exercise, function: Function) -> list[Outcome]:
    end, outcomes = time.monotonic() + SECONDS, []
    for case in exercise.cases:
        if outcomes and outcomes[-1].stopped:
            outcomes.append(replace(outcomes[-1], printed=""))
        else:
            outcomes.append(_run(exercise, function, case, end - time.monotonic()))
    return outcomes


def _arguments(case: Case, gradient: tuple[int, ...] = ()) -> list[Any]:
    """Fresh copies, so that nothing a function does reaches the next one."""
    fresh = []
    for place, argument in enumerate(case.arguments):
        if isinstance(argument, Tensor):
            argument = argument.detach().clone()
            if argument.is_floating_point():
                argument = argument if case.as_given else argument.double()
                argument.requires_grad_(place in gradient)
        else:
            argument = copy.deepcopy(argument)
        fresh.append(argument)
    return fresh


@torch.enable_grad()
def _run(exercise: Exercise, function: Function, case: Case, seconds: float) -> Outcome:
    leaves, before = _arguments(case, exercise.gradient), _arguments(case)
    # Copies once more: torch forbids to change a leaf in place, in words of its own.
    arguments = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    given = dict(zip(exercise.parameters, arguments))
    by_place = [given[name] for name in given if name not in exercise.keywords]
    by_name = {name: given.get(name) for name in exercise.keywords}
    # A function that calls itself means itself, not what an earlier check has put in its place.
    names = getattr(function, "__globals__", {}).items()
    itself = [n for n, v in names if isinstance(v, Checked) and v.key == exercise.key]
    printed = ""
    try:
        with contained(function, seconds, **dict.fromkeys(itself, function)) as out:
            try:
                value = function(*by_place, **by_name)
            finally:
                printed = out.text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = _own(value)
            graph = isinstance(value, Tensor) and value.requires_grad
            gradients = _gradients(value, [leaves[place] for place in exercise.gradient])
            value = _plain(value)
            listed = exercise.sequence and isinstance(value, list)
            if listed and all(isinstance(x, Real) and not isinstance(x, bool) for x in value):
                value = _tensor(value)  # so that a named slip is known in either form
    except BaseException as error:  # whatever the reader's function raises
        stopped = isinstance(error, TimeIsUp | KeyboardInterrupt)
        told, attempted = describe_error(error), not is_stub(error)
        return Outcome(error=told, attempted=attempted, stopped=stopped, printed=printed)
    changes = (
        (name, what)
        for name, *values in zip(exercise.parameters, arguments, leaves, before)
        if (what := _change(*values))
    )
    return Outcome(
        value=value, graph=graph, gradients=gradients, changed=next(changes, None), printed=printed
    )


def _own(value: Any) -> Any:
    """A tensor without what a class of its own would do when it is compared."""
    if isinstance(value, Tensor) and type(value) is not Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    return value


def _gradients(value: Any, arguments: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of a weighted sum of the result; the weights differ, so that no entry hides."""
    if not arguments:
        return ()
    if not (isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()):
        return (None,) * len(arguments)
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device)
    total = (value * weights.view(value.shape)).sum()
    found = torch.autograd.grad(total, arguments, allow_unused=True)
    return tuple(
        torch.zeros_like(a) if g is None else g for a, g in zip(arguments, found, strict=True)
    )


def _plain(value: Any) -> Any:
    """Comparable to the reference's: a tensor without graph, dense, on the CPU; NumPy's floats."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().clone()
        return value if value.layout == torch.strided else value.to_dense()
    if type(value) is int and abs(value) >= 2**63:
        return math.inf if value > 0 else -math.inf
    if isinstance(value, list | tuple) and all(type(entry) in (int, float) for entry in value):
        return [_plain(entry) for entry in value]
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


def _change(after: Any, leaf: Any, before: Any) -> str | None:
    """What a function has changed of an argument: a key of CHANGES, or None.

    Args:
        after: what it was given.
        leaf: of which that was a copy with a graph, if it is a tensor.
        before: what it was.
    """
    if isinstance(before, nn.Module):
        after, leaf, before = ([*model.parameters()] for model in (after, leaf, before))
    if isinstance(before, dict):
        after, leaf, before = ([*d, *d.values()] for d in (after, leaf, before))
    if isinstance(before, list | tuple):
        if len(after) != len(before):
            return "content"
        return next((what for three in zip(after, leaf, before) if (what := _change(*three))), None)
    if not isinstance(before, Tensor):
        plain = isinstance(before, str | int | float)
        return "content" if plain and not (after is before or after == before) else None
    if not isinstance(after, Tensor) or (after.shape, after.dtype) != (before.shape, before.dtype):
        return "content"
    kept = (after == before) | ((after != after) & (before != before))  # NaN is itself here
    if not _own(kept).all():
        return "content"
    if after.requires_grad != (before if after is leaf else leaf).requires_grad:
        return "requires_grad"
    return "grad" if leaf.grad is not None else None


def _kind(value: Tensor) -> str:
    if value.dtype == torch.bool:
        return "true or false (bool)"
    if value.is_complex():
        return "complex numbers"
    return "floating point" if value.is_floating_point() else "whole numbers"


def _fault(exercise: Exercise, wanted: Outcome, got: Outcome) -> str | None:
    """What is wrong with one outcome, in words to stand after a colon; None if nothing is."""
    if not got.attempted:
        return " your function still raises NotImplementedError here. Is a branch not written yet?"
    if got.stopped and got.error == "TimeIsUp":
        more = "Is there a loop that never ends?"
        return f" your function was still running after {SECONDS:.0f} seconds. {more}"
    if got.error is not None:
        return f" your function raised {got.error}."
    value, right = got.value, _tensor(wanted.value)
    if value is None:
        return " your function returned None. Is the `return` missing?"
    if not isinstance(value, Tensor):
        if not (exercise.number and type(value) in (int, float)):
            kind = "a number" if exercise.number else "a tensor"
            return f" expected {kind}, got {type(value).__name__}."
        value = _tensor(value)
    if value.is_nested:
        return " expected a tensor, got a nested tensor."
    if value.shape != right.shape:
        return f" expected shape {tuple(right.shape)}, got {tuple(value.shape)}."
    if _kind(value) != _kind(right):
        return f" expected {_kind(right)}, got {_kind(value)}."
    if (value.isnan() & ~right.isnan()).any():
        return f" NaN where a number belongs:{_difference(exercise, right, value)}"
    if not _close(exercise, value, right):
        return _difference(exercise, right, value)
    for mine, true in zip(got.gradients, wanted.gradients, strict=True):
        if mine is None and true is not None:
            return (
                " the value is right, but no gradient flows back through it, so nothing could "
                "learn from it. Is there a detach(), item() or no_grad()?"
            )
        if true is not None and not _close(exercise, mine, true):
            return (
                f" the value is right, but its gradient is not:{_difference(exercise, true, mine)}"
            )
    if got.graph and not wanted.graph:
        return " the value is right, but it still carries its graph. Use detach(), or no_grad()."
    return None


def _tensor(value: Tensor | float | list) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _close(exercise: Exercise, a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(_agree(exercise, a, b).all())


def _agree(exercise: Exercise, a: Tensor, b: Tensor) -> Tensor:
    """Entry by entry, bool; whole numbers have to be the same."""
    if not (a.is_floating_point() or b.is_floating_point() or a.is_complex() or b.is_complex()):
        return a == b
    limit = exercise.tolerance
    return torch.isclose(a.double(), b.double(), rtol=limit, atol=limit, equal_nan=True)


def _alike(exercise: Exercise, a: Outcome, b: Outcome) -> bool:
    """Whether two functions did the same with a case: value, gradients, what else they did."""
    if (a.error, a.graph, a.changed) != (b.error, b.graph, b.changed):
        return False
    if not all(isinstance(x.value, Tensor | int | float) for x in (a, b)):
        return a.value == b.value if isinstance(a.value, list | str) else a.value is b.value
    first, second = _tensor(a.value), _tensor(b.value)
    if first.shape != second.shape or _kind(first) != _kind(second):
        return False
    if not _close(exercise, first, second):
        return False
    return all(
        (g is None) == (h is None) and (g is None or _close(exercise, g, h))
        for g, h in zip(a.gradients, b.gradients, strict=True)
    )


def _difference(exercise: Exercise, right: Tensor, value: Tensor) -> str:
    """Both, or where they are long the first entry that is wrong; to stand after a colon."""
    where = ""
    if right.numel() > LONG:
        at = (~_agree(exercise, value, right)).nonzero()[0].tolist()
        where = f"\n  at {at}:"
        right, value = right[tuple(at)], value[tuple(at)]
    # Four decimals, unless it takes more to see the difference.
    digits = next((d for d in (4, 8) if _show(right, d) != _show(value, d)), 12)
    return f"{where}\n  expected {_show(right, digits)}\n  got      {_show(value, digits)}"


def _show(tensor: Tensor, digits: int) -> str:
    """Rounded by hand: how torch prints depends on its settings."""
    if tensor.dim() == 0:
        number = tensor.item()
        # + 0.0 turns -0.0 into 0.0
        return f"{round(number, digits) + 0.0:.12g}" if tensor.is_floating_point() else str(number)
    return "[" + ", ".join(_show(row, digits) for row in tensor) + "]"


def unwrapped(value: Any) -> Any:
    """What is behind a solved exercise, and behind decorators such as `torch.no_grad()`."""
    while isinstance(value, Checked) or hasattr(value, "__wrapped__"):
        value = value.use if isinstance(value, Checked) else value.__wrapped__
    return value
