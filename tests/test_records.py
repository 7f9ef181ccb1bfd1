"""How exercises are read from their text: their keys, and what is said about a mistake in it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minigrpo.exercises import all_exercises, check, hint, judge, reader, records, solution
from minigrpo.exercises.judge import judge_exercise
from minigrpo.exercises.records import FOLDER, read

TEXT = """\
# Multiples

```python
from minigrpo.logprobs import masked_mean
```

## product

```python
import torch


def product(x, factor):
    \"\"\"x (N,) -> (N,)\"\"\"
    x = x.clone()
    many = x * factor
    return torch.add(many, 0)
```

- package: `x * factor`

### Why

So that more comes out, or \\<as much>.
If you add, less does.

### Right too

```python
def by_sum(x, factor):
    parts = [x] * factor
    return sum(parts)
```
add it up, see {.1}.

### Wrong
- `many = x` Nothing is multiplied, or \\<by one>.
- `return torch.add(many, 0)` -> `pass` Nothing is returned.

### Wrong in `by_sum`
- `parts = [x] * 3` A factor stands in your function.

### Lapses
- `many = 2 * x`

### Cases
- one: `[1.0, 2.0]`, `2`

### Hints
- Multiply.
"""
AT = "12.md, 12.1 (product): "


def test_an_exercise_is_read_from_its_text():
    exercise = read(TEXT, 12)["12.1"]
    assert exercise.reference(torch.ones(1), 3) == exercise.package(torch.ones(1), 3) == 3
    assert exercise.imports == ("import torch",)
    assert exercise.why == "So that more comes out, or <as much>. If you add, less does."
    assert exercise.others[0].sentence == "add it up, see 12.1."
    assert [wrong.name for wrong in exercise.wrong] == [
        "`many = x`",
        "`return torch.add(many, 0)` -> `pass`",
        "`parts = [x] * 3`",
    ]
    assert exercise.wrong[0].sentence == "Nothing is multiplied, or <by one>."
    assert [wrong.function(torch.ones(1), 2) for wrong in exercise.wrong] == [1, None, 3]
    assert exercise.cases[0].name == "one" and exercise.cases[0].arguments[1] == 2
    assert torch.equal(exercise.cases[0].arguments[0], torch.tensor([1.0, 2.0]))


def test_the_fields_of_an_exercise_are_read():
    plain = read(TEXT, 12)["12.1"]
    assert (plain.gradient, plain.keywords, plain.tolerance) == ((), (), 1e-6)
    assert not (plain.number or plain.sequence)
    fields = "- gradient: x\n- keywords: factor\n- number: yes\n- list: yes\n- tolerance: 0.5\n"
    exercise = read(TEXT.replace("- package", f"{fields}- package"), 12)["12.1"]
    assert (exercise.gradient, exercise.keywords, exercise.tolerance) == ((0,), ("factor",), 0.5)
    assert exercise.number and exercise.sequence


def test_lists_of_arguments_are_a_case_for_each_row():
    line = "- one: `[1.0, 2.0]`, `2`"
    many = read(TEXT.replace(line, "- one: `[wave(2), wave(3)]`, `(2, 4)`, one by one"), 12)
    cases = many["12.1"].cases
    assert [case.name for case in cases] == ["one", "one"]
    assert [(len(case.arguments[0]), case.arguments[1]) for case in cases] == [(2, 2), (3, 4)]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("`many = x`", "`more = x`", "no line of the code begins like `more = x`"),
        ("x = x.clone()", "many = x", "more than one line of the code begins with 'many', like"),
        ("`many = x`", "`many = x * factor`", "`many = x * factor` changes nothing"),
        ("`return torch.add(many, 0)` ->", "`x` ->", "`x` stands 5 times in the code, not once"),
        (" Nothing is multiplied, or \\<by one>.", "", "`many = x`: a sentence is missing"),
        ("`many = 2 * x`", "`many = 2 * x` Two.", "`many = 2 * x`: a sentence is too much"),
        ("x` Nothing", "x` when `good` Nothing", "`many = x`: when `...` is too much"),
        ("`many = x` Nothing", "Nothing", "'Nothing is multiplied, or <by one>.' names no line"),
        ("`parts = [x] * 3`", "`parts = = x`", "invalid syntax (<12.1, Wrong: `parts = = x`>, lin"),
        ("in `by_sum`", "in `by_loop`", "Wrong in `by_loop`: no right way has this name"),
        ("- one: `[1.0, 2.0]`, `2`", "- one: `[1.0]`", "case 'one': missing a required argument: "),
        ("- one: `[1.0, 2.0]`, `2`", "- one: `[1.0]`, `2`, `3`", "case 'one': too many positional"),
        ("`2`\n", "`(2, 4, 6)`, one by one\n", "zip() argument 2 is longer than argument 1"),
        ("`[1.0, 2.0]`", "`ripple(2)`", "`ripple(2)`: name 'ripple' is not defined"),
        ("- one: `[1.0, 2.0]`, `2`", "- one", "'one' is not understood here"),
        ("### Wrong\n", "### Wrongs\n", "'Wrongs' is no section and no field of an exercise"),
        ("### Right too\n", "### Lapses\n", "### Right too is missing"),
        ("### Cases\n", "", "### Cases is missing"),
        ("### Why\n\nSo that more", "### Helpers\n\n- more", "### Why is missing"),
        ("### Hints\n", "", "### Hints is missing"),
        ("### Lapses", "### Mistakes", "'Mistakes' is no section and no field of an exercise"),
        ("- package", "- packages", "'packages' is no section and no field of an exercise"),
        ("- package: `x * factor`\n", "", "the field `- package: ` is missing"),
        ("- package: `x", "- gradient: y\n- package: `x", "'y' is not in list"),
        ("- package: `x * factor`", "- package", "'package' is not understood here"),
        (
            "### Wrong\n",
            "### Wrong\nA paragraph.\n\n",
            "'A paragraph.' is neither an item of a list",
        ),
        (
            "def by_sum(x, factor):",
            "by_sum = product",
            "a block of code with a function is expected, got 'by_s",
        ),
        (
            "## product\n",
            "## product\n\n## product\n",
            "two exercises of this file have this title",
        ),
    ],
)
def test_a_mistake_in_the_text_is_told_with_file_exercise_and_line(old, new, said):
    assert TEXT.count(old) == 1
    with pytest.raises(ValueError) as error:
        read(TEXT.replace(old, new), 12)
    assert AT + said in str(error.value)


def test_a_title_without_code_below_it():
    title, code = TEXT.index("\n```python\nimport torch"), TEXT.index("- package")
    with pytest.raises(ValueError, match=r"12.1 \(product\): below the title a block of code"):
        read(TEXT[:title] + TEXT[code:], 12)


def test_a_setup_that_fails():
    with pytest.raises(ValueError, match="12.md: No module named 'minigrpo.nothing'"):
        read(TEXT.replace("minigrpo.logprobs", "minigrpo.nothing"), 12)


@pytest.fixture
def only_12(tmp_path, monkeypatch, request):
    """The text of another notebook as the only one there is, called 12.md."""
    (tmp_path / "12.md").write_text((FOLDER / f"{request.param}.md").read_text("utf-8"), "utf-8")
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(reader, "_hints_given", {})
    records.records.cache_clear()
    yield
    records.records.cache_clear()


@pytest.mark.parametrize("only_12", ["02", "03"], indirect=True)
def test_the_number_of_the_file_and_the_place_in_it_are_the_key(only_12, capsys):
    keys = [exercise.key for exercise in all_exercises()]
    assert keys == [f"12.{place}" for place in range(1, len(keys) + 1)] and len(keys) >= 5
    first = all_exercises()[0]
    assert check("12.1", first.reference).passed
    assert judge("12.1", first.wrong[0].function)[1].startswith(f"12.1 ({first.title}): not right")
    hint("12.1")
    assert f"Hint 1 of {len(first.hints)} for 12.1: " in capsys.readouterr().out
    with pytest.raises(KeyError, match="12.1, 12.2"):
        solution("2.1")


@pytest.mark.parametrize("only_12", ["03"], indirect=True)
def test_what_a_text_says_about_its_own_exercises_follows(only_12):
    said = [text for exercise in all_exercises() for text in exercise.hints]
    said += [wrong.sentence for exercise in all_exercises() for wrong in exercise.wrong]
    written = (FOLDER / "03.md").read_text("utf-8")
    assert " ".join(said).count("exercise 12.") == written.count("exercise {.") > 3
    assert not any("exercise 3." in text or "{" in text for text in said)


def test_the_example_for_contributors_keeps_what_it_promises():
    contributing = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"
    (example,) = re.findall(
        r"^````markdown\n(.*?)^````$", contributing.read_text("utf-8"), re.M | re.S
    )
    setup = "# Example\n\n```python\nfrom minigrpo.logprobs import masked_mean\n```\n\n"
    exercise = read(setup + example, 12)["12.1"]
    for right in (exercise.reference, exercise.package, exercise.others[0].function):
        assert judge_exercise(exercise, right)[0] == "passed"
    for wrong in exercise.wrong:
        assert wrong.sentence in judge_exercise(exercise, wrong.function)[1]
    for case in exercise.cases:
        fewer = dataclasses.replace(exercise, cases=(case,))
        functions = [*(wrong.function for wrong in exercise.wrong), *exercise.lapses]
        judged = [judge_exercise(fewer, function)[0] for function in functions]
        assert "passed" in judged and "not passed" in judged


def test_judge_is_the_function_even_if_the_module_of_that_name_was_imported_first():
    code = "import minigrpo.exercises.judge; from minigrpo.exercises.judge import judge_exercise; "
    code += "from minigrpo.exercises import judge; print(judge.__name__, judge_exercise.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "judge judge_exercise\n", done.stderr
