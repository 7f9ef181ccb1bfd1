"""Answers to the exercises that were written from the tasks alone, without a look at the records.

They stand in attacks/NN.py, each wrong one with a witness, which shows that it is wrong.
"""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minigrpo.exercises.form import Case, changed
from minigrpo.exercises.judge import judge_exercise, run
from minigrpo.exercises.reader import find, judge

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Attack:
    """An answer to an exercise.

    Attributes:
        key: such as "2.3".
        function: the answer.
        wrong: whether it has to be refused.
        witness: arguments within the contract on which it goes wrong.
        refuses: of an answer that is a test: a right version of the code that it refuses.
        accepts: of an answer that is a test: a buggy version that it accepts.
    """

    key: str
    function: Function
    wrong: bool
    witness: tuple[Any, ...] = ()
    refuses: Function | None = None
    accepts: Function | None = None

    @property
    def name(self) -> str:
        return f"{self.key} {self.function.__name__}"

    def refused(self) -> bool:
        """Whether the judge refuses it; in a review it is given the right lines."""
        return judge(self.key, self.function, find(self.key).line)[0] != "passed"

    def proven(self) -> bool:
        """Whether the witness shows that it is wrong."""
        record = find(self.key)
        if not record.code:
            witness = dataclasses.replace(record)  # with a case of its own
            witness.__dict__.update(tried=[Case("witness", self.witness)], slips=[])
            if judge_exercise(witness, record.reference)[0] != "passed":
                return False
            return judge_exercise(witness, self.function)[0] != "passed"
        version = self.refuses or self.accepts or changed(record.code, tuple(record.bugs))
        verdict = run(record, self.function, Case("witness", (version,)), 10.0)
        clean = not verdict.value and verdict.error is None
        return not clean if self.refuses else clean


ATTACKS: list[Attack] = []


def wrong(
    key: str, *witness: Any, refuses: Function | None = None, accepts: Function | None = None
) -> Callable[[Function], Function]:
    """Put down a wrong answer; of a test without `refuses` and `accepts`, that it accepts the
    code shown."""

    def take(function: Function) -> Function:
        ATTACKS.append(Attack(key, function, True, witness, refuses, accepts))
        return function

    return take


def right(key: str) -> Callable[[Function], Function]:
    """Put down a right answer."""

    def take(function: Function) -> Function:
        ATTACKS.append(Attack(key, function, False))
        return function

    return take


def load() -> list[Attack]:
    """All of them, each file read once."""
    for path in sorted((Path(__file__).parent / "attacks").glob("*.py")):
        importlib.import_module(f"attacks.{path.stem}")
    return ATTACKS
