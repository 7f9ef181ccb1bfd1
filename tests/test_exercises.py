"""The proof of the exercises: right answers pass, and slips are told what they are."""

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from minigrpo.exercises import all_exercises, check
from minigrpo.exercises.form import ATTRIBUTES, Exercise, changed, compiled
from minigrpo.exercises.judge import brief, close, judge_exercise, plain, wanted
from minigrpo.exercises.reader import find
from minigrpo.exercises.shown import COLORS

EXERCISES = all_exercises()
PLAIN = [exercise for exercise in EXERCISES if not exercise.code]
each = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.key)
each_plain = pytest.mark.parametrize("exercise", PLAIN, ids=lambda e: e.key)


@each
def test_the_solution_and_the_other_right_ways_pass_without_a_remark(exercise):
    ways = [changed(exercise.reference, way) for way in exercise.right]
    for function in (exercise.reference, *ways):
        status, message = judge_exercise(exercise, function)
        assert status == "passed" and "remark" not in message, message


@each
def test_what_is_said_of_a_solution_has_a_name_that_is_read(exercise):
    assert {*vars(exercise.reference)} <= {*ATTRIBUTES, "title"}


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
    for case, outcome in zip(exercise.tried, wanted(exercise, exercise.reference), strict=True):
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
    beside = [e.title for e in EXERCISES if e.key.split(".")[0] == exercise.key.split(".")[0]]
    assert beside.count(exercise.title) == 1


def test_the_example_for_contributors_keeps_what_it_promises():
    text = (Path(__file__).resolve().parent.parent / "CONTRIBUTING.md").read_text("utf-8")
    (example,) = re.findall(r"^```python\n(@exercise.*?)^```$", text, re.M | re.S)
    imports = "import torch\nfrom minigrpo.logprobs import masked_mean\n"
    imports += "from minigrpo.exercises.form import exercise, texts\n"
    solution = compiled(imports + example, "masked_average", {"__name__": "__main__"}, "<example>")
    record = Exercise("12.1", solution)
    ways = [changed(record.reference, way) for way in record.right]
    for right in (record.reference, record.package, *ways):
        assert judge_exercise(record, right)[0] == "passed"
    for sentence, slip in record.slips:
        assert sentence in judge_exercise(record, slip)[1]
    message = judge_exercise(record, lambda x, mask: (x * mask).sum() / mask.sum())[1]
    assert "passed, with a remark.\nUnder a 0" in message


# what `check` shows in a notebook


@pytest.fixture
def page(monkeypatch):
    """What a notebook shows of a check, parsed, beside its text."""
    shown: list = []
    ipython = SimpleNamespace(display=SimpleNamespace(display=shown.append))
    monkeypatch.setitem(sys.modules, "IPython", ipython)

    def checked(key, function, line=None) -> tuple[ElementTree.Element, str]:
        for _ in range(2):
            check(key, function, line)
        assert shown[-1]._repr_html_() == shown[-2]._repr_html_()  # nbval compares them
        return ElementTree.fromstring(f"<div>{shown[-1]._repr_html_()}</div>"), repr(shown[-1])

    return checked


def contents(root: ElementTree.Element, tag: str) -> list[str]:
    return ["".join(one.itertext()) for one in root.iter(tag)]


def folds(root: ElementTree.Element) -> list[tuple[str, bool]]:
    """What stands on each, and whether it is open."""
    return [(one[0].text, "open" in one.attrib) for one in root.iter("details")]


def test_a_wrong_answer_is_shown_with_both_values_its_inputs_and_folded_hints(page):
    def everywhere(length):
        print("<b> & `this`")
        return torch.ones(length, length).bool()

    root, text = page("1.2", everywhere)
    title = root[0][0]
    assert title.text == "1.2 (causal mask): not right yet." and "#b84f00" in title.attrib["style"]
    sentence = "You let every position read all of them, also the one it has to predict."
    goes_on = "The notebook goes on with the course's version."
    assert contents(root, "p")[1:4] == [sentence, "Case 'length 3':", goes_on]
    beside = [one for one in root.iter("div") if "inline-block" in one.get("style", "")]
    assert [one[0].text for one in beside] == ["expected", "got"]
    values = ["[[1, 0, 0],\n [1, 1, 0],\n [1, 1, 1]]", "[[1, 1, 1],\n [1, 1, 1],\n [1, 1, 1]]"]
    assert contents(root, "pre") == [*values, "length = 3", "<b> & `this`"]
    hints = [(f"Hint {n} of 2", False) for n in (1, 2)]
    assert folds(root) == [("inputs", True), ("printed", True), *hints]
    table = "  expected [[1, 0, 0],\n            [1, 1, 0],\n"
    assert text.startswith(f"{title.text}\n{sentence}\nCase 'length 3':\n{table}")
    assert text.endswith(f'\n{goes_on} Stuck? hint("1.2").')


def test_a_pass_and_a_stub_are_short(page):
    def stub(*given):
        raise NotImplementedError

    root, text = page("1.2", find("1.2").reference)
    assert "#007050" in root[0][0].attrib["style"] and contents(root, "div") == [text]
    root, text = page("1.2", stub)
    said = "1.2 (causal mask): using the course's version. Write yours above."
    assert len(root[0][0].attrib) == 0 and root[0][0].text == said
    assert folds(root) == [("Hint 1 of 2", False), ("Hint 2 of 2", False)]
    assert text == f'{said} Stuck? hint("1.2").'
    root, text = page("8.1", find("8.1").reference, 99)
    assert "goes on" not in text and contents(root, "p")[2].startswith("line: expected the number")


def test_long_inputs_are_folded_and_a_tensor_has_a_row_a_line(page):
    root, _ = page("5.3", find("5.3").slips[0][1])
    assert folds(root)[0] == ("inputs", False)
    mask = "\nmask = [[1, 1, 0],\n        [0, 1, 1],\n        [1, 0, 0]] (int64)\n"
    assert mask in contents(root, "pre")[2]
    lines = brief(torch.arange(-21, 21).view(7, 6)).removesuffix(" (int64)").splitlines()
    assert {len(line) for line in lines} == {len(lines[0])}


@pytest.mark.parametrize("color", COLORS.values())
def test_white_is_readable_on_the_color_of_a_title(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [((x + 0.055) / 1.055) ** 2.4 for x in parts]  # close enough below 0.04, too
    assert 1.05 / (0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]) >= 4.5
