"""Run a function on hand-placed cases and say what it really does.

An exercise is a record: the reference, other right ways, wrong answers with the sentence that a
reader who gave one is told, and the cases that tell them apart. Values are compared, and
gradients too: a loss can have the right value and teach nothing.
"""

from __future__ import annotations

import copy
import dis
import inspect
import math
import re
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[..., Any]

LONG = 20
"""Of a tensor with more entries than this, a message shows only the first that is wrong."""


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
    """What a function did with one case.

    Attributes:
        error: the exception in words, or None.
        attempted: False for a stub that raises NotImplementedError.
        value: what it returned; a tensor without its graph.
        gradients: one per argument asked for; None where nothing flows back.
        changed: the place of the first argument that was changed in place, or None.
    """

    error: str | None = None
    attempted: bool = True
    value: Any = None
    gradients: tuple[Tensor | None, ...] = ()
    changed: int | None = None


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
    if not callable(function):
        return "not passed", f"{title}: expected your function, got {type(function).__name__}."
    wanted = _run_all(exercise, exercise.reference)
    got = _run_all(exercise, function)
    if not all(outcome.attempted for outcome in got):
        more = f'Write it, or ask for hint("{exercise.key}").'
        return "not attempted", f"{title}: not attempted yet. {more}"

    faults = [_fault(exercise, w, g) for w, g in zip(wanted, got, strict=True)]
    if any(faults):
        return "not passed", f"{title}: not right yet. {_explain(exercise, function, got, faults)}"
    if (place := next((o.changed for o in got if o.changed is not None), None)) is not None:
        name = list(inspect.signature(exercise.reference).parameters)[place]
        return "not passed", (
            f"{title}: the numbers are right, but your function changes its argument {name!r} in "
            "place, and whoever called it still needs it. Work on a copy."
        )
    if (name := _notebook_global(function)) is not None:
        return "not passed", (
            f"{title}: the numbers are right, but your function reads {name!r} from the notebook "
            "instead of its arguments: elsewhere it would compute with whatever that name holds."
        )
    return "passed", f"{title}: passed, all {len(exercise.cases)} cases."


def _explain(
    exercise: Exercise, function: Function, got: list[Outcome], faults: list[str | None]
) -> str:
    """The sentence of the named wrong answer that did the same, or the first difference."""
    at = next(i for i, fault in enumerate(faults) if fault)
    first = f"{_named(exercise.cases[at])}:{faults[at]}"
    for wrong in exercise.wrong:
        same = _run_all(exercise, wrong.function)
        if all(_alike(exercise, a, b) for a, b in zip(got, same, strict=True)):
            return f"{wrong.sentence}\n{first}"
    if (name := _notebook_global(function)) is not None:
        first += f"\nYour function reads {name!r} from the notebook. Is an argument meant?"
    return f'{first}\nhint("{exercise.key}") leads on.'


def _run_all(exercise: Exercise, function: Function) -> list[Outcome]:
    return [_run(function, case, exercise.gradient) for case in exercise.cases]


def _named(case: Case) -> str:
    """The name of a case, and the texts it consists of, so that places in them can be counted."""
    texts = [repr(argument) for argument in case.arguments if isinstance(argument, str)]
    return ", ".join([f"Case {case.name!r}", *texts])


def _arguments(case: Case, gradient: tuple[int, ...] = ()) -> list[Any]:
    """Fresh copies, so that nothing a function does reaches the next one."""
    fresh = []
    for place, argument in enumerate(case.arguments):
        if isinstance(argument, Tensor):
            argument = argument.detach().clone()
            if argument.is_floating_point():
                argument = argument if case.as_given else argument.double()
                argument.requires_grad_(place in gradient)
        elif isinstance(argument, list | tuple):
            argument = copy.deepcopy(argument)
        fresh.append(argument)
    return fresh


def _run(function: Function, case: Case, gradient: tuple[int, ...]) -> Outcome:
    leaves = _arguments(case, gradient)
    # Forked: a function that draws random numbers shall not change the reader's next draw.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        # Not torch.manual_seed, which writes down a traceback for each kind of GPU, every time.
        torch.default_generator.manual_seed(0)
        warnings.simplefilter("ignore")  # they name a file and a line of this machine
        # Copies once more: torch forbids to change a leaf in place, in words of its own.
        arguments = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        try:
            value = function(*arguments)
            gradients = _gradients(value, [leaves[place] for place in gradient])
            value = _plain(value)
        except (Exception, SystemExit) as error:  # whatever the reader's function raises
            return Outcome(error=describe_error(error), attempted=not is_stub(error))
    changed = (i for i, (a, b) in enumerate(zip(arguments, leaves)) if not _untouched(a, b))
    return Outcome(value=value, gradients=gradients, changed=next(changed, None))


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
        value = value.detach().cpu()
        return value if value.layout == torch.strided else value.to_dense()
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


def _untouched(after: Any, before: Any) -> bool:
    if not isinstance(before, Tensor):
        return True
    if (after.shape, after.dtype) != (before.shape, before.dtype):
        return False
    return torch.equal(after.nan_to_num(nan=0.5), before.nan_to_num(nan=0.5))


def is_stub(error: BaseException) -> bool:
    """Whether a line of Python raised it: torch has a NotImplementedError too, for operations."""
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    names = traceback.tb_frame.f_code.co_names
    return isinstance(error, NotImplementedError) and "NotImplementedError" in names


def describe_error(error: BaseException) -> str:
    """Type and first line, without what differs between machines."""
    first = (str(error).strip().splitlines() or [""])[0]
    first = re.sub(r"( at)? 0x[0-9a-fA-F]+", "", first)
    first = textwrap.shorten(first, 200, placeholder=" ...").removesuffix(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _kind(value: Tensor) -> str:
    if value.dtype == torch.bool:
        return "true or false (bool)"
    if value.is_complex():
        return "complex numbers"
    return "floating point" if value.is_floating_point() else "whole numbers"


def _fault(exercise: Exercise, wanted: Outcome, got: Outcome) -> str | None:
    """What is wrong with one outcome, in words to stand after a colon; None if nothing is."""
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
    return None


def _tensor(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _close(exercise: Exercise, a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(_agree(exercise, a, b).all())


def _agree(exercise: Exercise, a: Tensor, b: Tensor) -> Tensor:
    """Entry by entry, bool."""
    limit = exercise.tolerance
    return torch.isclose(a.double(), b.double(), rtol=limit, atol=limit, equal_nan=True)


def _alike(exercise: Exercise, a: Outcome, b: Outcome) -> bool:
    """Whether two functions did the same with a case, gradients included."""
    if a.error or b.error:
        return (a.error or "").split(":")[0] == (b.error or "").split(":")[0]
    if not all(isinstance(x.value, Tensor | int | float) for x in (a, b)):
        return a.value is b.value
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


def _notebook_global(function: Function) -> str | None:
    """The first name outside the function that it reads and that is data, not code; None if none.

    Modules, classes and functions are fine, and numbers from `math`; a model is data. The reader's
    own functions are looked into, those of libraries are not.
    """
    function = _unwrapped(function)
    home = getattr(function, "__globals__", None)
    seen: set[int] = set()
    waiting = [function]
    while waiting and home is not None:
        current = waiting.pop()
        if id(current) in seen or getattr(current, "__globals__", None) is not home:
            continue
        seen.add(id(current))
        for name, value in _outside(current):
            value = _unwrapped(value)
            if isinstance(value, types.FunctionType):
                waiting.append(value)
            elif isinstance(value, type):
                waiting.extend(vars(value).values())
            elif isinstance(value, nn.Module) or not (_is_library(value) or callable(value)):
                return name
    return None


def _unwrapped(value: Any) -> Any:
    """What is behind a solved exercise, and behind decorators such as `torch.no_grad()`."""
    while isinstance(value, Checked) or hasattr(value, "__wrapped__"):
        value = value.use if isinstance(value, Checked) else value.__wrapped__
    return value


def _is_library(value: Any) -> bool:
    """Modules, and constants that were imported by name, such as `inf` and `float64`."""
    constants = vars(math).values()
    return isinstance(value, types.ModuleType | torch.dtype) or any(value is c for c in constants)


def _outside(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The (name, value) of everything that a function reads from around it."""
    for name in _globals_read(function.__code__):
        if name in function.__globals__:  # not a builtin
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # an empty cell: a name that nobody has set
            yield name, cell.cell_contents


def _globals_read(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_read(constant)
