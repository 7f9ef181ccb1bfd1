"""The proof of the exercises: right answers pass, and slips are told what they are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minigrpo.exercises import all_exercises
from minigrpo.exercises.form import ATTRIBUTES, Exercise, changed, compiled, notebooks
from minigrpo.exercises.judge import close, judge_exercise, plain, wanted

EXERCISES = all_exercises()
PLAIN = [exercise for exercise in EXERCISES if not exercise.code]
each = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.key)
each_plain = pytest.mark.parametrize("exercise", PLAIN, ids=lambda e: e.key)


@each
def test_the_solution_and_the_other_right_ways_pass_without_a_remark(exercise):
    for function in (
        exercise.reference,
        *(changed(exercise.reference, way) for way in exercise.right),
    ):
        status, message = judge_exercise(exercise, function)
        assert status == "passed" and "remark" not in message, message


@each
def test_what_is_said_of_a_solution_has_a_name_that_is_read(exercise):
    assert {*vars(exercise.reference)} <= {*ATTRIBUTES, "settings"}


@each_plain
def test_the_solution_passes_in_float32(exercise):
    """As transformers and TRL do it: with `.float()` on every argument that has a fraction."""

    def as_float(value):
        fraction = isinstance(value, Tensor) and value.is_floating_point()
        return value.float() if fraction else value

    def in_float32(*arguments, **options):
        options = {name: as_float(value) for name, value in options.items()}
        return exercise.reference(*map(as_float, arguments), **options)

    status, message = judge_exercise(exercise, in_float32)
    assert status == "passed", message


@each_plain
def test_the_package_has_the_same_numbers(exercise):
    if exercise.package is None:
        return
    for case, outcome in zip(exercise.tried, wanted(exercise), strict=True):
        value = plain(exercise.package(*case.arguments))
        if isinstance(outcome.value, Tensor):
            assert value.shape == outcome.value.shape, case.name
            assert close(exercise, value, outcome.value).all(), case.name
        else:
            assert value == outcome.value, case.name


@each
def test_every_slip_is_told_what_it_is(exercise):
    assert len(exercise.slips) <= 6
    for sentence, slip in exercise.slips:
        status, message = judge_exercise(exercise, slip)
        assert status == "not passed", sentence
        assert sentence in message, f"{sentence}\n\n{message}"


@each_plain
def test_inputs_are_as_they_occur(exercise):
    """Floating point is float32, unless the task is about another; magnitudes are those met."""
    for case in exercise.tried:
        for value in case.arguments:
            if type(value) is Tensor and value.is_floating_point() and not case.remark:
                assert value.dtype != torch.float64, case.name
                assert value.isfinite().all() or case.name in exercise.cases, case.name
                assert value[value.isfinite()].abs().max() <= 1e4 if value.numel() else True


@each
def test_there_are_hints_and_a_reason(exercise):
    assert 2 <= len(exercise.hints.strip().splitlines()) <= 3 and len(exercise.why.split()) >= 15
    assert inspect.getdoc(exercise.reference) or exercise.code


@pytest.mark.parametrize("notebook", notebooks())
def test_each_notebook_has_at_least_three_exercises_numbered_in_order(notebook):
    keys = [e.key for e in EXERCISES if e.key.startswith(f"{notebook}.")]
    assert keys == [f"{notebook}.{place}" for place in range(1, len(keys) + 1)]
    assert len(keys) >= 3
    assert len({e.title for e in EXERCISES if e.key in keys}) == len(keys)


def test_the_example_for_contributors_keeps_what_it_promises():
    text = (Path(__file__).resolve().parent.parent / "CONTRIBUTING.md").read_text("utf-8")
    (example,) = re.findall(r"^```python\n(@exercise.*?)^```$", text, re.M | re.S)
    imports = (
        "import torch\nfrom minigrpo.logprobs import masked_mean\n"
        "from minigrpo.exercises.form import exercise, texts\n"
    )
    solution = compiled(imports + example, "masked_average", {"__name__": "__main__"}, "<example>")
    record = Exercise("12.1", solution, *solution.settings)
    for right in (
        record.reference,
        record.package,
        *(changed(record.reference, way) for way in record.right),
    ):
        assert judge_exercise(record, right)[0] == "passed"
    for sentence, slip in record.slips:
        assert sentence in judge_exercise(record, slip)[1]
    message = judge_exercise(record, lambda x, mask: (x * mask).sum() / mask.sum())[1]
    assert "passed, with a remark. Under a 0" in message


def test_a_repr_gives_nothing_away():
    assert repr(Exercise("9.9", len, "a title", None, [], [], 1e-4, None)) == (
        "<exercise 9.9: a title>"
    )
