"""One line instead of another: found by how it begins, and put in without a trace outside."""

from __future__ import annotations

import pytest

from minigrpo.clinic.mistakes import head, mutant, replaced

SOURCE = """\
def f(x):
    y = x + 1
    if y > 3:
        return y
    z = y * 2
    return g(z)
"""


def g(z):
    return z


def f(x):
    y = x + 1
    return g(y)


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        ("    return x", "return"),
        ("a, b = 1, 2", "a, b"),
        ("total += f(x=1)", "total"),
        ("nn.functional.pad(a, b)", "nn.functional.pad"),
        ("if x == 1:", "if"),
    ],
)
def test_how_a_line_begins(line, begins):
    assert head(line) == begins


@pytest.mark.parametrize(
    ("new", "old", "line"),
    [
        ("y = x - 1", None, 1),
        ("return z", None, 5),  # the last of several
        ("w = 5; z = w", None, 4),  # the first statement that begins like a line
        ("return 0", "return y", 3),
    ],
)
def test_one_line_is_replaced_and_keeps_its_place(new, old, line):
    before, after = SOURCE.splitlines(), replaced(SOURCE, new, old).splitlines()
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [line]
    indent = len(before[line]) - len(before[line].lstrip())
    assert after[line] == " " * indent + new


def test_a_line_that_begins_like_none_or_like_two_is_an_error():
    with pytest.raises(ValueError, match="no line of the code begins like `w = 1`"):
        replaced(SOURCE, "w = 1")
    with pytest.raises(ValueError, match="more than one line of the code begins with 'y'"):
        replaced(SOURCE + "    y = 2\n", "y = 1")
    with pytest.raises(ValueError, match="no line of the code begins like `return q`"):
        replaced(SOURCE, "return 0", "return q")


def test_a_mutant_lives_in_the_module_of_the_healthy_one_which_stays():
    sick = mutant(f, "y = x - 1", ("return g(y)", "return g(y) * 10"))
    assert sick(3) == 20 and f(3) == 4
    assert sick.__globals__ is f.__globals__ and sick.__module__ == f.__module__
