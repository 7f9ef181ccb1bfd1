"""The engine of the exercises: run a function on hand-placed cases and say what it really does.

An exercise is a record: the reference, other right ways, named wrong answers with the sentence
that a reader who gave one is told, and the cases that tell them apart. Values are compared, and
gradients too: a loss can have the right value and teach nothing.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import os
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


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
        gradient: which arguments the result must be differentiable in.
        number: whether a plain Python number is accepted instead of a tensor.
        lapses: further wrong functions, without a name; they prove that every case is needed.
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
    gradient: tuple[int, ...] = ()
    number: bool = False
    lapses: tuple[Function, ...] = ()
    tolerance: float = 1e-6


@dataclass(frozen=True)
class Outcome:
    """What a function did with one case: an exception, or a value and its gradients."""

    error: str | None = None
    value: Any = None
    gradients: tuple[Tensor | None, ...] = ()


class Checked:
    """What `check` returns: call it, and you call the right function.

    Attributes:
        use: the reader's function if it passed, the reference otherwise.
        passed: whether it passed.
        status: "passed", "not attempted" or "wrong".
    """

    def __init__(self, key: str, use: Function, status: str) -> None:
        self.key, self.use, self.status = key, use, status
        self.passed = status == "passed"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<exercise {self.key}: {self.status}>"


def check(key: str, function: Function) -> Checked:
    """Try the reader's function on the cases of an exercise, and print what was found.

    Nothing that the function does is raised. With the environment variable MINIGRPO_STRICT=1
    everything but a pass raises AssertionError instead.

    Args:
        key: such as "2.3".
        function: the reader's.

    Raises:
        KeyError: there is no such exercise.
        AssertionError: strict, and not passed.
    """
    exercise = find(key)
    status, message = judge(exercise, function)
    if os.environ.get("MINIGRPO_STRICT") == "1" and status != "passed":
        raise AssertionError(message)
    print(message)
    use = function if status == "passed" else exercise.reference
    return Checked(key, use, status)


_hints_given: dict[str, int] = {}


def hint(key: str, number: int | None = None) -> None:
    """Print the next hint of an exercise, or the one with this number (1, 2, ...).

    Raises:
        KeyError: there is no such exercise.
        ValueError: there is no such hint.
    """
    hints = find(key).hints
    if number is None:
        number = min(_hints_given.get(key, 0) + 1, len(hints))
    if not 1 <= number <= len(hints):
        raise ValueError(f"number: expected 1 to {len(hints)}, got {number}")
    _hints_given[key] = number
    print(f"Hint {number} of {len(hints)} for {key}: {hints[number - 1]}")


def solution(key: str) -> None:
    """Print the source of an exercise's reference, which the tests run, and its imports.

    Raises:
        KeyError: there is no such exercise.
    """
    print(solution_source(key))
    for other in find(key).others:
        print(f"# Another way: {other.sentence}")


def solution_source(key: str) -> str:
    """The source that, put in place of the stub, solves the exercise."""
    exercise = find(key)
    source = inspect.getsource(exercise.reference)
    return "\n".join([*exercise.imports, "", "", source])


# --------------------------------------------------------------------------------------------
# the records


@cache
def records(notebook: int) -> dict[str, Exercise]:
    """The exercises of one notebook by key; empty if it has none."""
    name = f"minigrpo.exercises.notebook_{notebook:02d}"
    if importlib.util.find_spec(name) is None:
        return {}
    return {exercise.key: exercise for exercise in importlib.import_module(name).EXERCISES}


def every_exercise() -> list[Exercise]:
    """All exercises of the course, in order."""
    return [exercise for number in range(1, 10) for exercise in records(number).values()]


def find(key: str) -> Exercise:
    """The record of one exercise.

    Raises:
        KeyError: there is no such exercise; the message lists those there are.
    """
    notebook = str(key).split(".")[0]
    here = records(int(notebook)) if notebook.isdecimal() else {}
    if key in here:
        return here[key]
    keys = ", ".join(here or (exercise.key for exercise in every_exercise()))
    raise KeyError(f"key: expected the key of an exercise ({keys}), got {key!r}")


# --------------------------------------------------------------------------------------------
# running and comparing


def judge(exercise: Exercise, function: Function) -> tuple[str, str]:
    """Decide. Returns the status ("passed", "not attempted", "wrong") and what to print."""
    title = f"{exercise.key} ({exercise.title})"
    if isinstance(function, Checked):
        function = function.use
    if not callable(function):
        return "wrong", f"{title}: expected your function, got {type(function).__name__}."
    wanted = _run_all(exercise, exercise.reference)
    got = _run_all(exercise, function)
    if any(outcome.error == "NotImplementedError" for outcome in got):
        more = f'Write it, or ask for hint("{exercise.key}").'
        return "not attempted", f"{title}: not attempted yet. {more}"

    faults = [_fault(exercise, w, g) for w, g in zip(wanted, got, strict=True)]
    if any(faults):
        return "wrong", f"{title}: not right yet. {_explain(exercise, wanted, got, faults)}"
    if (changed := _changed_argument(exercise, function)) is not None:
        return "wrong", (
            f"{title}: the numbers are right, but your function changes its argument number "
            f"{changed + 1} in place, and whoever called it still needs it. Work on a copy."
        )
    if (name := _notebook_global(function)) is not None:
        return "wrong", (
            f"{title}: the numbers are right, but your function reads {name!r} from the notebook "
            "instead of its arguments: elsewhere it would compute with whatever that name holds."
        )
    return "passed", f"{title}: passed, all {len(exercise.cases)} cases."


def _explain(
    exercise: Exercise, wanted: list[Outcome], got: list[Outcome], faults: list[str | None]
) -> str:
    """The sentence of the named wrong answer that did the same, or the first difference."""
    at = next(i for i, fault in enumerate(faults) if fault)
    first = f"Case {exercise.cases[at].name!r}:{faults[at]}"
    for wrong in exercise.wrong:
        same = _run_all(exercise, wrong.function)
        if all(_alike(exercise, a, b) for a, b in zip(got, same, strict=True)):
            return f"{wrong.sentence}\n{first}"
    return f'{first}\nhint("{exercise.key}") leads on.'


def _run_all(exercise: Exercise, function: Function) -> list[Outcome]:
    return [_run(function, case, exercise.gradient) for case in exercise.cases]


def _arguments(case: Case, gradient: tuple[int, ...] = ()) -> list[Any]:
    """Fresh copies, so that nothing a function does reaches the next one."""
    fresh = []
    for place, argument in enumerate(case.arguments):
        if isinstance(argument, Tensor):
            argument = argument.detach().clone()
            if argument.is_floating_point():
                argument = argument if case.as_given else argument.double()
                argument.requires_grad_(place in gradient)
        fresh.append(argument)
    return fresh


def _run(function: Function, case: Case, gradient: tuple[int, ...]) -> Outcome:
    arguments = _arguments(case, gradient)
    try:
        # Forked: a function that draws random numbers shall not change the reader's next draw.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            value = function(*arguments)
            gradients = _gradients(value, [arguments[place] for place in gradient])
    except NotImplementedError:
        return Outcome(error="NotImplementedError")
    except Exception as error:  # whatever the reader's function raises is an answer
        return Outcome(error=_describe_error(error))
    return Outcome(
        value=value.detach() if isinstance(value, Tensor) else value, gradients=gradients
    )


def _gradients(value: Any, arguments: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of a weighted sum of the result; the weights differ, so that no entry hides."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return (None,) * len(arguments)
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    found = torch.autograd.grad((value * weights).sum(), arguments, allow_unused=True)
    return tuple(
        torch.zeros_like(a) if g is None else g for a, g in zip(arguments, found, strict=True)
    )


def _describe_error(error: Exception) -> str:
    """Type and first line, without what differs between machines."""
    first = (str(error).strip().splitlines() or [""])[0]
    first = re.sub(r" at 0x[0-9a-f]+", "", first)[:120]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _kind(value: Tensor) -> str:
    if value.dtype == torch.bool:
        return "true or false (bool)"
    return "floating point" if value.is_floating_point() else "whole numbers"


def _fault(exercise: Exercise, wanted: Outcome, got: Outcome) -> str | None:
    """What is wrong with one outcome, in words to stand after a colon; None if nothing is."""
    if got.error is not None:
        return f" your function raised {got.error}."
    value, right = got.value, torch.as_tensor(wanted.value)
    if value is None:
        return " your function returned None. Is the `return` missing?"
    if not isinstance(value, Tensor):
        if not (exercise.number and isinstance(value, int | float)):
            return f" expected a tensor, got {type(value).__name__}."
        value = torch.tensor(float(value), dtype=right.dtype)
    if value.shape != right.shape:
        return f" expected shape {tuple(right.shape)}, got {tuple(value.shape)}."
    if _kind(value) != _kind(right):
        return f" expected {_kind(right)}, got {_kind(value)}."
    if (value.isnan() & ~right.isnan()).any():
        return f" NaN where there is none:\n  expected {_show(right)}\n  got      {_show(value)}"
    if not _close(exercise, value, right):
        return f"\n  expected {_show(right)}\n  got      {_show(value)}"
    for mine, true in zip(got.gradients, wanted.gradients, strict=True):
        if mine is None and true is not None:
            return (
                " the value is right, but no gradient flows back through it, so nothing could "
                "learn from it. Is there a detach(), item() or no_grad()?"
            )
        if true is not None and not _close(exercise, mine, true):
            return (
                " the value is right, but its gradient is not:\n"
                f"  expected {_show(true)}\n  got      {_show(mine)}"
            )
    return None


def _close(exercise: Exercise, a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    limit = exercise.tolerance
    return a.shape == b.shape and torch.allclose(a, b, rtol=limit, atol=limit, equal_nan=True)


def _alike(exercise: Exercise, a: Outcome, b: Outcome) -> bool:
    """Whether two functions did the same with a case, gradients included."""
    if a.error or b.error:
        return (a.error or "").split(":")[0] == (b.error or "").split(":")[0]
    if not all(isinstance(x.value, Tensor | int | float) for x in (a, b)):
        return a.value is b.value
    first, second = torch.as_tensor(a.value), torch.as_tensor(b.value)
    if first.shape != second.shape or _kind(first) != _kind(second):
        return False
    if not _close(exercise, first, second):
        return False
    return all(
        (g is None) == (h is None) and (g is None or _close(exercise, g, h))
        for g, h in zip(a.gradients, b.gradients, strict=True)
    )


def _show(tensor: Tensor) -> str:
    """Rounded to 4 decimals, by hand: how torch prints depends on its settings."""
    if tensor.dim() == 0:
        number = tensor.item()
        # + 0.0 turns -0.0 into 0.0
        return f"{round(number, 4) + 0.0:g}" if tensor.is_floating_point() else str(number)
    return "[" + ", ".join(_show(row) for row in tensor.detach()) + "]"


def _changed_argument(exercise: Exercise, function: Function) -> int | None:
    """The place of an argument that the function writes into, or None."""
    for case in exercise.cases:
        given, kept = _arguments(case), _arguments(case)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            function(*given)
        for place, (after, before) in enumerate(zip(given, kept, strict=True)):
            if isinstance(after, Tensor) and not torch.equal(
                after.double().nan_to_num(nan=0.5), before.double().nan_to_num(nan=0.5)
            ):
                return place
    return None


def _notebook_global(function: Function) -> str | None:
    """The first global name that the function reads and that is data, not code; None if none.

    Modules, classes, and functions are fine, the reader's own helpers too (which are looked into).
    """
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        current = waiting.pop()
        code = getattr(current, "__code__", None)
        if code is None or id(current) in seen:
            continue
        seen.add(id(current))
        for name in _globals_read(code):
            if name not in current.__globals__:
                continue  # a builtin
            value = current.__globals__[name]
            if isinstance(value, types.ModuleType) or callable(value):
                ours = getattr(value, "__globals__", None) is current.__globals__
                waiting.extend([value] if ours else [])
            else:
                return name
    return None


def _globals_read(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_read(constant)
