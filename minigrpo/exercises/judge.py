"""Run a function on the cases of an exercise, and say what it really does, like a colleague.

In a review, cases are versions of the code, and the value is whether a test raises AssertionError.
"""

import ast
import dis
import inspect
import re
import textwrap
import time
import traceback
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from minigrpo.exercises.form import Case, Exercise, Function
from minigrpo.exercises.guard import TimeIsUp, contained, describe_error, is_stub

SECONDS = 10.0  # that a function may take for all cases together
LONG = 20  # of a tensor with more entries, a message shows the first that is wrong
WORST = ("time", "value", "kind", "NaN", "error", "stub", "gradient")  # shown first
DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "multinomial"}
DRAWS |= {"random", "choice", "shuffle", "uniform", "sample", "normal", "bernoulli"}
SEEDS = {"manual_seed", "Generator", "seed", "Random", "default_rng"}
NOT_YET, EXPECTED, GOT = "not right yet.\n", "\n  expected ", "\n  got      "


@dataclass
class Outcome:
    """What a function did with a case."""

    value: Any = None  # a tensor without its graph, where it is one or can be one
    gradients: tuple[Tensor, ...] = ()  # 0 where nothing flows back
    error: str | None = None
    backward: str | None = None  # what went wrong in the backward pass
    attempted: bool = True  # False for a stub
    stopped: bool = False
    changed: str | None = None  # the name of an argument that was changed in place
    printed: str = ""


@dataclass(frozen=True)
class Fault:
    """What is wrong with an outcome, in words to stand after a colon."""

    kind: str  # one of WORST
    text: str
    size: float = 0.0  # of the error in value


Outcomes, Faults = list[Outcome], list[Fault | None]


class Checked:
    """What `check` returns: call it, and you call `use`. The reader wrote `attempt`."""

    def __init__(self, key: str, use: Function, status: str, attempt: Function) -> None:
        self.key, self.use, self.status = key, use, status  # passed, not passed, not attempted
        self.passed, self.attempt = status == "passed", attempt
        self.__wrapped__, self.__doc__ = use, use.__doc__  # help() and ?? show it, not this

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<exercise {self.key}: {self.status}>"


def judge_exercise(exercise: Exercise, function: Function) -> tuple[str, str]:
    """Decide. Returns the status ("passed", "not passed", "not attempted") and what to print."""
    title = f"{exercise.key} ({exercise.title}): "
    if complaint := no_function(function):
        return "not passed", f"{title}{NOT_YET}Expected your function, got {complaint}"
    got = outcomes(exercise, function)
    if not any(outcome.attempted for outcome in got):
        nothing = "no test yet" if exercise.code else "using the course's version"
        return "not attempted", f"{title}{nothing}. Write yours above."
    compare = fault_of_test if exercise.code else fault_of
    does = wanted(exercise, exercise.reference)
    faults = [compare(exercise, *three) for three in zip(exercise.tried, does, got)]
    remarks = [case.remark for case, fault in zip(exercise.tried, faults) if fault]
    wrong = of_the_test(function, got) if exercise.code else ""
    if not wrong and not all(remarks):
        wrong = explanation(exercise, function, got, faults)
    elif not wrong and (name := next((outcome.changed for outcome in got if outcome.changed), "")):
        wrong = f"Right numbers, but your function changes its argument {name!r} in place. Copy it."
    elif not wrong and (name := notebook_data(exercise, function)):
        wrong = f"Right numbers, but your function reads {name!r} from the notebook."
    right = "your test tells all {} versions apart." if exercise.code else "all {} cases."
    right = f"with a remark.\n{remarks[0]}" if remarks else right.format(len(got))
    text = f"{NOT_YET}{wrong}" if wrong else f"passed, {right}"
    return "not passed" if wrong else "passed", title + text + printed(got)


def no_function(function: Any) -> str | None:
    """What was given instead of a function, as the end of a sentence; None for a function."""
    plain = inspect.unwrap(function)
    if not callable(function):
        return f"{type(function).__name__}. Give check its name alone, without calling it."
    if inspect.isclass(plain):
        return f"the class {plain.__name__}. Write a function with `def`."
    if inspect.isgeneratorfunction(plain):
        return "a generator, because it contains `yield`. Collect the results, and `return` them."
    return None


def outcomes(exercise: Exercise, function: Function) -> list[Outcome]:
    """What a function does with every case; after one that took too long, no other is tried."""
    end, results = time.monotonic() + SECONDS, []
    for case in exercise.tried:
        stopped, left = results and results[-1].stopped, end - time.monotonic()
        results.append(results[-1] if stopped else run(exercise, function, case, left))
    return results


wanted = cache(outcomes)  # of the solution and its slips, which stay what they are


def run(exercise: Exercise, function: Function, case: Case, seconds: float) -> Outcome:
    """What a function does with a case."""
    result, act = Outcome(), run_test if exercise.code else run_case
    with contained(seconds) as out:
        act(exercise, function, case, result)
    result.printed, error = out.text, out.error
    if exercise.code and (isinstance(error, AssertionError) or type(error).__name__ == "Failed"):
        result.value = assertion(function, error)  # Failed: of pytest
    elif error is not None and result.value is not None:
        result.backward, result.stopped = describe_error(error), isinstance(error, TimeIsUp)
    elif error is not None:
        result.error, result.attempted = describe_error(error), not is_stub(error)
        result.stopped = isinstance(error, TimeIsUp | KeyboardInterrupt)
    return result


def run_case(exercise: Exercise, function: Function, case: Case, result: Outcome) -> None:
    names = exercise.parameters
    leaves = dict(zip(names, copies(case.arguments)))
    asked = [leaves[name].requires_grad_() for name in exercise.gradient.split()]
    given = {n: v.clone() if isinstance(v, Tensor) else v for n, v in leaves.items()}
    by_name = {name: given.pop(name, None) for name in exercise.keywords.split()}
    value = function(*given.values(), **by_name)
    made = [w.view(-1) for m in given.values() for w in getattr(m, "parameters", tuple)()]
    value = [value, *torch.cat(made).tolist()] if made and is_number(value) else value
    now = zip(names, [*given.values(), *by_name.values()], copies(case.arguments))
    result.changed = next((name for name, after, before in now if not same(after, before)), None)
    result.value = plain(value)
    result.gradients = gradients(value, asked, exercise.graph)


def run_test(exercise: Exercise, test: Function, case: Case, result: Outcome) -> None:
    """The value: the assertion that failed, or None; "" stands for a version never called."""
    calls = []

    def function(*args: Any, **kwargs: Any) -> Any:  # nothing tells it from the other versions
        calls.append(args)
        return case.arguments[0](*args, **kwargs)

    test(function)
    result.value = None if calls else ""


def copies(values: Any) -> list[Any]:
    known: dict = {}  # an optimizer still belongs to its model, a tensor given twice becomes two
    return [v.detach().clone() if isinstance(v, Tensor) else deepcopy(v, known) for v in values]


def gradients(value: Any, inputs: list[Tensor], graph: bool) -> tuple[Tensor, ...]:
    """Of a weighted sum of the result; the weights differ, so that no entry hides."""
    flows = isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()
    if not (flows or graph) or not inputs:
        return tuple(map(torch.zeros_like, inputs))
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return torch.autograd.grad((value * weights).sum(), inputs, materialize_grads=not graph)


def plain(value: Any) -> Any:
    """A tensor without its graph; numbers, lists of numbers, and several tables as one tensor."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple) and value and all(map(is_number, value)):
        value = [x.item() if hasattr(x, "item") else x for x in value]
        whole = all(isinstance(x, int) for x in value)
        return torch.tensor(value, dtype=None if whole else torch.float64)
    if isinstance(value, list | tuple) and value and all(isinstance(x, Tensor) for x in value):
        tables = [x.detach().double() for x in value]
        alike = len({x.shape for x in tables}) == 1
        return torch.stack(tables) if alike else torch.cat([x.flatten() for x in tables])
    return torch.tensor(float(value), dtype=torch.float64) if is_number(value) else value


def is_number(value: Any) -> bool:
    return isinstance(value, Real) or isinstance(value, Tensor) and value.dim() == 0


def same(after: Any, before: Any) -> bool:
    """Whether an argument is what it was."""
    if isinstance(before, list | tuple):
        return len(after) == len(before) and all(map(same, after, before))
    if isinstance(before, Tensor):
        shaped = after.shape == before.shape and after.dtype == before.dtype
        return shaped and torch.allclose(after, before, rtol=0.0, atol=0.0, equal_nan=True)
    return after == before or isinstance(after, torch.Generator | nn.Module | torch.optim.Optimizer)


def fault_of(exercise: Exercise, _: Any, right: Outcome, got: Outcome) -> Fault | None:
    """What is wrong with one outcome; None if nothing is."""
    if not got.attempted:
        return Fault("stub", "your function raises NotImplementedError here. Is a branch missing?")
    if got.stopped:
        text = f"all cases together took more than {SECONDS:.0f} seconds. Does a loop never end?"
        return Fault("time", "it was interrupted." if got.error == "KeyboardInterrupt" else text)
    if got.error is not None:
        return Fault("error", f"your function raised {got.error}.")
    value, expected = got.value, right.value
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        if value is None and expected is not None:
            return Fault("kind", "your function returned None. Is the `return` missing?")
        if not isinstance(expected, Tensor):
            text = item(EXPECTED, brief(expected)) + item(GOT, brief(value))
            return None if value == expected else Fault("value", text, 1.0)
        what = "a tensor" if expected.dim() else "a number"
        more = " with something else than numbers in it" * isinstance(value, list | tuple)
        return Fault("kind", f"expected {what}, got {type(value).__name__}{more}.")
    if value.shape != expected.shape:
        return Fault("kind", f"expected shape {(*expected.shape,)}, got {(*value.shape,)}.")
    if kind(value) != kind(expected) and expected.dim():
        return Fault("kind", f"expected {kind(expected)}, got {kind(value)}.")
    if not close(exercise, value, expected).all():
        if (value.isnan() & ~expected.isnan()).any():
            return Fault("NaN", "NaN in place of a number:" + difference(exercise, expected, value))
        off = (value.double() - expected.double()).abs() / (1 + expected.double().abs())
        size = off.nan_to_num(posinf=1e9).max().item() if expected.isfinite().all() else 0.0
        return Fault("value", difference(exercise, expected, value), size)
    if got.backward is not None:
        return Fault("gradient", f"right, but taking the gradient raised {got.backward}.")
    for name, gradient, expected in zip(exercise.gradient.split(), got.gradients, right.gradients):
        if not close(exercise, gradient, expected).all():
            text = f"its gradient is not:{difference(exercise, expected, gradient)}"
            if not gradient.any():
                text = f"no gradient flows back to {name}. Is there a detach() or a no_grad()?"
            return Fault("gradient", f"the value is right, but {text}")
    return None


def kind(value: Tensor) -> str:
    number = "floating point" if value.is_floating_point() else "whole numbers"
    return "true or false (bool)" if value.dtype == torch.bool else number


def close(exercise: Exercise, a: Tensor, b: Tensor) -> Tensor:
    """Entry by entry, bool."""
    if not (a.is_floating_point() or b.is_floating_point()):
        return a == b
    limit = exercise.tolerance
    return torch.isclose(a.double(), b.double(), rtol=limit, atol=limit / 10, equal_nan=True)


def explanation(exercise: Exercise, function: Function, got: Outcomes, faults: Faults) -> str:
    """The sentence of the slip that did the same, and the most telling case."""
    (case, fault), of_bugs = shown(exercise, faults), faults[: len(exercise.bugs)]
    first = fault.text
    if len(of_bugs) > 1 and all(f == fault for f in of_bugs):
        first = first.replace("does not see one", "sees none").replace("on it", "on each")
    if not exercise.code:
        first = f"Case {case.name!r}: {first}{inputs(exercise, case)}".replace(": \n", ":\n")
    for sentence, slip in exercise.slips:
        if explains(exercise, wanted(exercise, slip), got, faults):
            return f"{first} {sentence}" if exercise.code else f"{sentence}\n{first}"
    first += f" {case.sentence}" if case.sentence else ""
    if (name := notebook_data(exercise, function)) is not None:
        first += f"\nYour function reads {name!r} from the notebook, the same in every case."
    name, asked = getattr(function, "__name__", "<lambda>"), exercise.reference.__name__
    if name not in (asked, "<lambda>") and not exercise.code:
        first += f"\nThe exercise asks for {asked}, you gave {name}. Is it the one you meant?"
    return first


def shown(exercise: Exercise, faults: Faults) -> tuple[Case, Fault]:
    """A wrong value comes first, then a large error; of those alike, what is quickly read."""
    found = [pair for pair in zip(exercise.tried, faults) if pair[1] and not pair[0].remark]
    worst = min((fault.kind for _, fault in found), key=WORST.index)
    found = [pair for pair in found if pair[1].kind == worst]
    enough = min(max(fault.size for _, fault in found), 0.25) / 5  # beyond 0.25 all are telling

    def reading(pair: tuple[Case, Fault]) -> tuple:
        text = " ".join(inputs(exercise, pair[0]).split())
        hard = re.search(r"\.\.\.|inf|nan", text) is not None
        return hard, pair[0].name[:6] == "random", len(text) // 99  # of those alike, the first

    return min((pair for pair in found if pair[1].size >= enough), key=reading)


def explains(exercise: Exercise, does: Outcomes, got: Outcomes, faults: Faults) -> bool:
    """Whether a slip did the same where the answer gave numbers, and was wrong there somewhere."""
    pairs = zip(faults, map(partial(alike, exercise), got, does))
    pairs = [pair for case, pair in zip(exercise.tried, pairs) if not case.remark]
    noise = ("NaN", "error")  # may come on top of a slip
    follows = all(same or fault and fault.kind in noise for fault, same in pairs)
    return follows and any(fault and same for fault, same in pairs)


def alike(exercise: Exercise, a: Outcome, b: Outcome) -> bool:
    """Whether two functions did the same with a case: value, gradients, or the same error."""
    if a.error or b.error or exercise.code:
        return a.error == b.error and bool(a.value) == bool(b.value)
    worked = replace(b, backward=None)  # the same error there, too, is no difference
    return a.backward == b.backward and fault_of(exercise, None, a, worked) is None


def fault_of_test(exercise: Exercise, case: Case, right: Outcome, got: Outcome) -> Fault | None:
    """What a test gets wrong about one version."""
    if not got.attempted:
        return Fault("stub", "Your test still raises NotImplementedError at one point.")
    if got.stopped:
        return Fault("time", f"All versions together took more than {SECONDS:.0f} seconds.")
    another = case.name == "another bug"
    if got.error is not None and not another:  # to crash on another is to notice it
        return Fault("error", f"Your test crashed on {case.name}: {got.error}. Let it assert.")
    if bool(got.value) == (another or bool(right.value)) or got.error is not None:
        return None
    if got.value:
        return Fault("value", f"Your test refuses {case.name}{got.value}.", 0.2)
    if another:
        return Fault("value", "Your test finds the bug shown, but misses one of its kind.", 0.1)
    return Fault("value", f"Your test does not see {case.name}: it passes on it.", 0.3)


def of_the_test(test: Function, got: list[Outcome]) -> str:
    """What is wrong with a test whatever it is run on, in words; empty if nothing is."""
    nodes: list[ast.AST] = []
    with suppress(Exception):  # no source to be had, in one of many ways
        nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(test)))))]
    names = {getattr(n, "id", getattr(n, "attr", "")) for n in nodes}
    asserts = [n for n in nodes if isinstance(n, ast.Assert)]
    if any(isinstance(n.test, ast.Tuple) and n.test.elts for n in asserts):
        return "Your assert is followed by a pair in brackets, and a pair is always true."
    if not any(outcome.value or outcome.error for outcome in got):
        if any(outcome.value == "" for outcome in got):
            return "Your test never calls what it is given, so it can't tell the versions apart."
        if nodes and not asserts and not re.search("assert|fail|raises", " ".join(names), re.I):
            return "There is no assert in your test, so it can fail on nothing: say what must hold."
    tried = [n for tr in nodes if isinstance(tr, ast.Try) and tr.handlers for n in tr.body]
    if any(isinstance(n, ast.Assert) for n in tried) and not any(outcome.value for outcome in got):
        return "The except around your assert catches its AssertionError. Leave the try out."
    if (drawn := names & DRAWS) and not names & SEEDS:
        text = f"Your test draws other numbers each time ({', '.join(sorted(drawn))})."
        return f"{text} Choose them by hand, or use torch.manual_seed first."
    return ""


def assertion(test: Function, error: AssertionError) -> str:
    """Which assertion failed, if the source can be had, and what it said; after a blank."""
    message = describe_error(error).removeprefix(type(error).__name__).removeprefix(": ")
    message = f", which says: {message}" if message else ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if frame.name == inspect.unwrap(test).__name__]
    return f", at `{lines[-1]}`{message}" if lines and lines[-1] else message or ", at an assert"


def judge_line(exercise: Exercise, line: Any) -> tuple[bool, str]:
    """Whether the wrong line is named, or all of them, and what to say."""
    expected, last = {*exercise.line}, len(exercise.shown)
    n = len(expected)
    if line is None:
        return False, f"Now name the wrong line{': line=1' if n == 1 else 's: line=(1, 2)'}."
    named = set(line) if isinstance(line, list | tuple | set | range) else {line}
    if not named or not all(isinstance(x, int) and 1 <= x <= last for x in named):
        return False, f"line: expected the number of a line, 1 to {last}, or several, got {line!r}."
    lines = ("Lines " if len(named) > 1 else "Line ") + " and ".join(map(str, sorted(named)))
    for number, others in exercise.also_lines.items():
        if number not in named and (elsewhere := named.intersection(others)):
            named = named - {min(elsewhere)} | {number}  # it can be mended there too
    if named == expected:
        return True, f"{lines}: found."
    if len(named) > n:
        return False, f"You name {len(named)} lines; name {n}."
    hits = "not the wrong one" if n == 1 else f"{len(named & expected)} of the {n} wrong ones"
    return False, f"{lines}: {hits}."


def printed(got: Outcomes) -> str:
    """What a function printed first, short."""
    lines = next((outcome.printed for outcome in got if outcome.printed), "").strip().splitlines()
    shown = [*(line[:80] for line in lines[:3]), *["..."] * (len(lines) > 3)]
    return "\n  printed" + "".join(f"\n    {line}" for line in shown) if lines else ""


def inputs(exercise: Exercise, case: Case) -> str:
    """The arguments of a case, below each other, short."""
    pairs = zip(exercise.parameters, case.arguments)
    lines = [item(f"\n    {name} = ", text) for name, value in pairs if (text := brief(value))]
    return "\n  inputs" + "".join(lines) if lines else ""


def item(head: str, text: str) -> str:
    """All lines of a text as far in as the first, which stands behind its head."""
    return head + text.replace("\n", "\n" + " " * (len(head) - 1))


def brief(value: Any, room: int = 300) -> str:
    """A value, short; empty for what has no short form, such as a model."""
    if isinstance(value, Tensor):
        long = value.numel() > room  # then its digits alone need more, and writing them takes long
        if long or len(re.sub(" +", " ", text := digits_of(value, 6))) > room:
            text = f"{digits_of(value.flatten()[:5], 6)[:-1]}, ...] of shape {tuple(value.shape)}"
        return f"{text} ({str(value.dtype).removeprefix('torch.')})"
    text = repr(value)
    if isinstance(value, list | tuple):
        text = text[0] + ", ".join(" ".join(brief(one).split()) for one in value) + text[-1]
    if re.search(" at 0x|\n", text):
        return ""
    return text if len(text) <= room else text[:room] + "..."


def difference(exercise: Exercise, right: Tensor, value: Tensor) -> str:
    """Both, or where they are long the first entry that is wrong; to stand after a colon."""
    where = ""
    if right.numel() > LONG:
        at = tuple((~close(exercise, value, right)).nonzero()[0].tolist())
        where, right, value = f"\n  at       {[*at]}", right[at], value[at]
    digits = next((d for d in (4, 6) if digits_of(right, d) != digits_of(value, d)), 9)
    return where + item(EXPECTED, digits_of(right, digits)) + item(GOT, digits_of(value, digits))


def digits_of(tensor: Tensor, digits: int, width: int = 0, depth: int = 1) -> str:
    """With so many significant digits, a row a line, whatever the settings of torch."""
    if tensor.dim() == 0:
        number = tensor.item()
        text = f"{number + 0.0:.{digits}g}" if isinstance(number, float) else str(int(number))
        return text.rjust(width)
    if tensor.dim() > 1 and not width:
        width = max((len(digits_of(one, digits)) for one in tensor.flatten()), default=1)
    gap = ", " if tensor.dim() == 1 else ",\n" + " " * depth
    return "[" + gap.join(digits_of(row, digits, width, depth + 1) for row in tensor) + "]"


def notebook_data(exercise: Exercise, function: Function) -> str | None:
    """A tensor or model of the notebook that the function reads instead of an argument, by name."""
    plain = inspect.unwrap(function)
    names = {} if exercise.code else getattr(plain, "__globals__", {})
    for step in dis.get_instructions(plain) if names else ():
        value = names.get(step.argval) if step.opname == "LOAD_GLOBAL" else None
        if isinstance(value, Tensor) or isinstance(value, nn.Module) and value.state_dict():
            return step.argval
    return None
