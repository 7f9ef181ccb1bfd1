"""The form of a mistake: found by its piece or by how its line begins, planted without a trace."""

import pytest

from minigrpo.clinic.mistakes import exchanged, head, replaced

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
        ("z = y * 3", "z = y * 2", 4),
    ],
)
def test_one_line_is_replaced_and_keeps_its_place(new, old, line):
    before, after = SOURCE.splitlines(), replaced(SOURCE, new, old).splitlines()
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [line]
    indent = len(before[line]) - len(before[line].lstrip())
    assert after[line] == " " * indent + new


def test_what_is_not_there_or_there_twice_is_an_error():
    with pytest.raises(ValueError, match="no line of the code begins like `w = 1`"):
        replaced(SOURCE, "w = 1")
    with pytest.raises(ValueError, match="more than one line of the code begins with 'y'"):
        replaced(SOURCE + "    y = 2\n", "y = 1")
    for piece, times in (("return q", 0), ("return", 2)):
        with pytest.raises(ValueError, match=f"found {times} times: `{piece}`"):
            replaced(SOURCE, "return 0", piece)


def test_what_is_planted_is_met_by_everyone_and_gone_after_the_block():
    imported = f
    with exchanged((f, "x + 1", "x - 1"), (f, "g(y)", "g(y) * 10")):
        assert imported(3) == 20
    assert imported(3) == 4


def test_nothing_is_planted_if_one_of_several_is_not_there():
    lines = (f, "x + 1", "x"), (g, "return q", "return z")
    with pytest.raises(ValueError, match="found 0 times"), exchanged(*lines):
        pass
    with pytest.raises(ZeroDivisionError), exchanged((f, "x + 1", "x / 0")):
        f(3)
    assert f(3) == 4 and g(1) == 1
