"""Try a reader's test on the right version of a piece of code and on the buggy ones.

A review is a record: code with planted bugs, for which the reader names the line and writes the
test. Here the reader's function is the judge, and it is judged.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigrpo.exercises.guard import TimeIsUp, contained, describe_error, is_stub
from minigrpo.exercises.judge import SECONDS, Answer, Function, no_function, said
from minigrpo.exercises.outside import instructions, names_outside

SEEDS = (0, 0, 1)
"""Of the rounds in which a test meets the versions, every second time in the opposite order."""


@dataclass(frozen=True)
class Bug:
    """A line planted in a piece of code.

    Attributes:
        line: its number in the code that is shown, whose first line is 1.
        version: the code with this bug and no other.
        cure: one sentence.
        also: other lines in which it can be mended as well; naming one of them is right too.
    """

    line: int
    version: Function
    cure: str
    also: tuple[int, ...] = ()


@dataclass
class Call:
    """One call that a test made: the arguments by name, copied, and what became of the result."""

    arguments: SimpleNamespace
    raised: bool = False
    differentiated: bool = False


@dataclass(frozen=True)
class Verdict:
    """What a test said about one version of the code.

    Attributes:
        failed: an assertion failed.
        message: which one, and what it said; to stand after a comma.
        error: any other exception in words; then there is no verdict.
        attempted: False for a stub.
        stopped: whether it ran out of time or was interrupted.
        calls: what the version was called with.
        printed: what the test printed.
    """

    failed: bool = False
    message: str = ""
    error: str | None = None
    attempted: bool = True
    stopped: bool = False
    calls: list[Call] = field(default_factory=list)
    printed: str = ""


@dataclass(frozen=True)
class Trial:
    """A reader's test, and its verdicts."""

    test: Function
    right: Verdict
    buggy: tuple[Verdict, ...]

    @property
    def good(self) -> bool:
        right = not self.right.failed and self.right.error is None
        return right and all(verdict.failed for verdict in self.buggy)

    @property
    def upside_down(self) -> bool:
        return self.right.failed and not all(verdict.failed for verdict in self.buggy)

    @property
    def differentiated(self) -> bool:
        return any(call.differentiated for call in self.right.calls)

    def passes(self, version: Function) -> bool:
        """Whether the test accepts this version too; it may be nonsense."""
        verdict = _try(self.test, version)
        return not verdict.failed and verdict.error is None

    def every(self, condition: Callable[[SimpleNamespace], Any]) -> bool:
        """Whether this holds for the arguments of every call."""
        return all(bool(condition(call.arguments)) for call in self.right.calls)


@dataclass(frozen=True)
class Weak:
    """A test that does not do.

    Attributes:
        name: a few words.
        function: what a reader might write.
        sentence: what to say to one who wrote something of the kind.
        when: how to know the kind.
    """

    name: str
    function: Function
    sentence: str
    when: Callable[[Trial], bool]


@dataclass(frozen=True)
class Review:
    """All there is to know about one review.

    Attributes:
        key: notebook and number, such as "8.3".
        title: a few words.
        code: what is shown, with all its bugs.
        right: the same without them.
        bugs: the planted ones.
        reference: the solution, a test: it takes a version, and asserts.
        imports: the import lines that the code and the reference need.
        others: other right tests.
        wrong: the tests that are told by name; the first that fits is told.
        hints: from a question to almost the answer.
        why: why the reference finds the bug, and the usual slip.
        also_right: other right versions; a test has to pass on them.
        also_wrong: other versions with a bug of the planted kind; a test has to fail on them.
        lapses: further weak tests, without a name; they show that these versions are needed.
    """

    key: str
    title: str
    code: Function
    right: Function
    bugs: tuple[Bug, ...]
    reference: Function
    imports: tuple[str, ...]
    others: tuple[Answer, ...]
    wrong: tuple[Weak, ...]
    hints: tuple[str, ...]
    why: str = ""
    also_right: tuple[Answer, ...] = ()
    also_wrong: tuple[Answer, ...] = ()
    lapses: tuple[Function, ...] = ()

    @property
    def line(self) -> int | tuple[int, ...]:
        """What `check` wants to hear as `line`."""
        lines = tuple(bug.line for bug in self.bugs)
        return lines if len(lines) > 1 else lines[0]


def code_lines(review: Review) -> list[str]:
    """What `show` prints, without the numbers."""
    return inspect.getsource(review.code).splitlines()


def judge_review(
    review: Review, test: Function, line: int | Iterable[int] | None = None
) -> tuple[str, str, bool]:
    """Decide about a test and a line.

    Returns the status ("passed", "not passed", "not attempted"), what to print, and
    whether the test is right, whatever the line.
    """
    title = f"{review.key} ({review.title})"
    if told := no_function(test):
        return "not passed", f"{title}: expected your test, a function; got {told}", False
    before, rounds = list(_around(test)), _rounds(review, test)
    *buggy, right = rounds[0]
    trial = Trial(test, right, tuple(buggy))
    if not any(verdict.attempted for verdict in rounds[0]):
        more = f'Write yours above, or ask for hint("{review.key}").'
        return "not attempted", f"{title}: no test yet. {more}", False

    status, about_line = _judge_line(review, line)
    fault = _weakness(review, trial, _unsteady(trial, rounds, before))
    if not (fault := fault or _beyond(review, test)):
        both = "the buggy version" if len(buggy) == 1 else "both buggy versions"
        passed = "passed, " if status == "passed" else ""
        told = f"your test fails on {both} and passes on the right one"
        return status, f"{title}: {passed}{told}. {about_line}", True
    more = f'{said(right.printed)}\n{about_line}\nTry hint("{review.key}").'
    return "not passed", f"{title}: not right yet. {fault}{more}", False


def _rounds(review: Review, test: Function) -> list[list[Verdict]]:
    """What the test says about each buggy version and the right one, in each round."""
    versions = [*(bug.version for bug in review.bugs), review.right]
    begin, rounds, verdict = time.monotonic(), [], Verdict()
    for number, seed in enumerate(SEEDS):
        used = time.monotonic() - begin
        if number and (verdict.stopped or used + 2 * used / number > SECONDS):
            break  # a slow test meets each version once
        step, found = (-1) ** number, []
        for version in versions[::step]:
            if not verdict.stopped:
                verdict = _try(test, version, begin + SECONDS - time.monotonic(), seed)
            found.append(verdict)
        rounds.append(found[::step])
    return rounds


def _unsteady(trial: Trial, rounds: list[list[Verdict]], before: list[str]) -> str:
    """What to say of a test that does not say the same in each round; empty if it does."""
    told = {tuple((verdict.failed, verdict.error is None) for verdict in r) for r in rounds}
    if (len(told) > 1 or trial.upside_down) and before != list(_around(trial.test)):
        return (
            "Your test keeps something from one run to the next, so what it says about a version "
            "depends on what it met before. Make everything inside the test."
        )
    if len(told) > 1:
        return (
            "Your test doesn't say the same each time it meets the same version: chance decides. "
            "Choose the numbers by hand, or draw enough of them after torch.manual_seed."
        )
    return ""


def _beyond(review: Review, test: Function) -> str:
    """What a test that knows the planted bug gets wrong about the other versions, in words."""
    end = time.monotonic() + SECONDS
    for also in review.also_right:
        verdict = _try(test, also.function, end - time.monotonic())
        if verdict.failed or verdict.error is not None:
            how = f"crashes ({verdict.error}) on" if verdict.error else "refuses"
            return f"Your test {how} a version that is right too{verdict.message}. {also.sentence}"
    for also in review.also_wrong:
        verdict = _try(test, also.function, end - time.monotonic())
        if not verdict.failed and verdict.error is None:  # to crash on it is to notice it
            return f"Your test finds the bug shown, but misses one of its kind. {also.sentence}"
    return ""


def _weakness(review: Review, trial: Trial, unsteady: str) -> str:
    """What is wrong with a test, in words; empty if nothing is."""
    number = len(trial.buggy)
    buggy = "the buggy version" if number == 1 else "a buggy version"
    for which, verdict in (("the right version", trial.right), *((buggy, v) for v in trial.buggy)):
        if not verdict.attempted:
            return "Your test still raises NotImplementedError at one point. Write it to its end."
        if verdict.stopped:
            return (
                f"Your test was still running after {SECONDS:.0f} seconds on {which}, or it was "
                "interrupted. Is there a loop that never ends?"
            )
        if verdict.error is not None:
            inside = verdict.calls and verdict.calls[-1].raised
            where = f"inside {which}, with the arguments that you give" if inside else f"on {which}"
            return (
                f"Your test crashed {where}: {verdict.error}. A crash is not a verdict: the test "
                "has to reach an assert, and that one has to fail."
            )
    if not trial.good and not asserts(trial.test):
        return (
            "There is no assert in your test, so it can fail on nothing. What comes back or is "
            "printed is not looked at: say with assert what must hold."
        )
    if not trial.right.calls:
        return (
            "Your test never calls what it is given, so it cannot know which version that is. "
            "Call it with arguments of your choice, and assert what must come out."
        )
    if trial.good or unsteady:
        return unsteady
    if trial.upside_down:
        fault = (
            f"Your test is upside down: it passes on {buggy} and fails on the right "
            f"one{trial.right.message}."
        )
    elif trial.right.failed:
        return f"Your test refuses the right version too{trial.right.message}."
    elif any(verdict.failed for verdict in trial.buggy):
        fault = "Your test finds one of the two bugs and misses the other."
    elif number == 1:
        fault = "Your test does not see the bug: it passes on both versions."
    else:
        fault = "Your test sees neither of the two bugs."
    for weak in review.wrong:
        with suppress(Exception):  # a condition on arguments of a kind that nobody thought of
            if weak.when(trial):
                return f"{fault} {weak.sentence}"
    return fault


def asserts(test: Function) -> bool:
    """Whether the test, or a function of its notebook that it calls, has an assertion."""
    for current in _functions(test):
        names = {str(step.argval) for step in instructions(current.__code__)}
        steps = {step.opname for step in instructions(current.__code__)}
        if "LOAD_ASSERTION_ERROR" in steps or any(
            re.search("assert|fail|raises", n, re.I) for n in names
        ):
            return True
    return False


def _functions(test: Function) -> Iterator[FunctionType]:
    """The test, and the functions of its notebook that it calls."""
    waiting, seen = [test], []
    while waiting:
        current = inspect.unwrap(waiting.pop())
        if current in seen or not isinstance(current, FunctionType):
            continue
        seen.append(current)
        yield current
        waiting += [current.__globals__.get(str(s.argval)) for s in instructions(current.__code__)]


def _around(test: Function) -> Iterator[str]:
    """What the test reads around it, written down."""
    for current in _functions(test):
        for _, value, _ in [*names_outside(current), ("", current.__defaults__, True)]:
            if not isinstance(value, ModuleType | type):
                with suppress(Exception):  # its text is code of the reader's
                    yield f"{value!r} {getattr(value, '__dict__', '')}"


def _judge_line(review: Review, line: Any) -> tuple[str, str]:
    """The status if the test is right, and what to say about the line."""
    wanted = {bug.line for bug in review.bugs}
    last = len(code_lines(review))
    two = len(wanted) > 1
    if line is None:
        if two:
            return "not passed", "Now name the two wrong lines, such as line=(1, 2)."
        return "not passed", "Now name the wrong line, such as line=1."
    try:
        named = {line} if isinstance(line, int) else set(line)
    except TypeError:
        named = {None}
    if not named or not all(type(number) is int for number in named):
        return "not passed", "line: expected the number of a line, or several, such as (1, 2)."
    if beyond := sorted(number for number in named if not 1 <= number <= last):
        return "not passed", f"There is no line {beyond[0]}: the code has lines 1 to {last}."
    lines = " and ".join(map(str, sorted(named)))
    for bug in review.bugs:
        if bug.line not in named and (elsewhere := named.intersection(bug.also)):
            named = named - {min(elsewhere)} | {bug.line}  # it can be mended there too
    if named == wanted:
        return "passed", f"Lines {lines}: found." if two else f"Line {lines}: found."
    if len(named) > len(wanted):
        return "not passed", f"You name {len(named)} lines; name {len(wanted)}."
    if not two:
        return "not passed", f"Line {lines} is not the wrong one."
    if len(named) == 1:
        found = "is one of the two wrong lines, name the other too" if named < wanted else "is not"
        return "not passed", f"Line {lines} {found}."
    hits = {0: "Neither is a wrong one", 1: "One of the two is wrong indeed, the other is not"}
    return "not passed", f"Lines {lines}: {hits[len(named & wanted)]}."


def _try(test: Function, version: Function, seconds: float = SECONDS, seed: int = 0) -> Verdict:
    calls: list[Call] = []
    with contained(test, seconds) as out:
        for begin_at in (torch.default_generator.manual_seed, random.seed, np.random.seed):
            begin_at(seed)
        found = Verdict(calls=calls)
        try:
            test(_watched(version, calls))
        except AssertionError as error:
            found = Verdict(failed=True, message=_assertion(test, error), calls=calls)
        except BaseException as error:  # pytest.fail raises something that is no Exception
            stopped = isinstance(error, TimeIsUp | KeyboardInterrupt)
            told, attempted = describe_error(error), not is_stub(error)
            found = Verdict(error=told, attempted=attempted, stopped=stopped, calls=calls)
    return replace(found, printed=out.text)


def _watched(version: Function, calls: list[Call]) -> Function:
    """The version, with a record of its calls, and with nothing that tells it from the others."""

    def function(*args: Any, **kwargs: Any) -> Any:
        call = Call(SimpleNamespace(), raised=True)
        calls.append(call)
        bound = inspect.signature(version).bind(*args, **kwargs)  # its TypeError names no function
        bound.apply_defaults()
        call.arguments = SimpleNamespace(**{k: _copy(v) for k, v in bound.arguments.items()})
        value = version(*args, **kwargs)
        call.raised = False
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda gradient: setattr(call, "differentiated", True))
        return value

    return function


def _copy(argument: Any) -> Any:
    return argument.detach().clone() if isinstance(argument, Tensor) else argument


def _assertion(test: Function, error: AssertionError) -> str:
    """Which assertion failed, if the source can be had, and what it said."""
    said = describe_error(error).removeprefix("AssertionError").removeprefix(": ")
    said = f", which says: {said}" if said else ""
    with suppress(Exception):  # no source to be had, in one of many ways
        source, start = inspect.getsourcelines(test)
        numbers, traceback = [], error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code is test.__code__:
                numbers.append(traceback.tb_lineno - start + 1)
            traceback = traceback.tb_next
        text = textwrap.dedent("".join(source))
        statement = next(
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Assert | ast.Expr)
            and node.lineno <= numbers[-1] <= node.end_lineno
        )
        words = ast.get_source_segment(text, statement)
        return f", at `{textwrap.shorten(words, 120, placeholder=' ...')}`{said}"
    return said
