"""Formulas as pictures: all that stand in the notebooks can be drawn, and pages load nothing."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tools import course, formulas

NOTEBOOKS = sorted((course.ROOT / "notebooks").glob("*.ipynb"))


def width(svg: str) -> float:
    return float(re.search(r'style="width: ([\d.]+)em', svg)[1])


def test_a_formula_becomes_a_picture_with_its_source_as_label():
    svg = formulas.svg(r"\pi_\theta < 1")
    assert svg.startswith('<svg role="img" aria-label="\\pi_\\theta &lt; 1" viewBox="0 ')
    assert "\n" not in svg and 'fill="currentColor"' in svg
    assert width(formulas.svg("x + x")) > 2 * width(formulas.svg("x"))


@pytest.mark.parametrize(
    ("latex", "mathtext"),
    [
        (r"\lvert o \rvert", "| o |"),
        (r"\frac14", r"\frac{1}{4}"),
        (r"\tfrac12", r"\frac{1}{2}"),
        (r"\sqrt d", r"\sqrt{d}"),
        (r"\mathcal L", r"\mathcal{L}"),
        (r"a \le b \ge c", r"a \leq b \geq c"),
        (r"\Big(a\big)", "(a)"),
        (r"\left(a\right)", r"\left(a\right)"),
    ],
)
def test_what_latex_calls_otherwise_is_the_same_picture(latex, mathtext):
    def drawn(formula):
        return re.sub('aria-label=".*?" ', "", formulas.svg(formula))

    assert drawn(latex) == drawn(mathtext)


def test_a_formula_that_cannot_be_drawn_is_named():
    with pytest.raises(ValueError, match=r"formula .*nonsense.* cannot be drawn: .*Unknown symbol"):
        formulas.svg(r"\nonsense{x}")


def test_text_and_code_are_left_alone():
    text = "It costs 5$ or `$x$`, not $x$.\n\n```\n$y$\n```\n\n$$\\frac1N$$\n"
    found = formulas.with_pictures(text)
    assert found.count("<svg") == 2 and "`$x$`" in found and "```\n$y$\n```" in found
    assert found.startswith("It costs 5$ or ")
    display = re.search(r'<span class="formula">(.*?)</span>', found)[1]
    assert "dfrac" in display and "$" not in display


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_shows_every_formula_and_loads_nothing(path):
    nb = nbformat.read(path, as_version=4)
    page = course.page(nb, path, Path("build"))
    assert "<script" not in page
    pictures = re.findall("<img[^>]*>", page)
    assert pictures and all(re.search(r'alt="[^"]{40,}"', picture) for picture in pictures)
    assert not re.findall(r'(?:src|srcset|data)="(?!data:)', page)
    assert not re.findall(r'<link[^>]+href="|@import|url\("?https?:', page)
    text = re.sub(r"<pre.*?</pre>|<code.*?</code>|<style.*?</style>", "", page, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", "", text)
    assert not re.findall(r"\$\$|\\(?:frac|sum|log|pi)\b", text)
    assert [cell.source for cell in nb.cells] == [
        cell.source for cell in nbformat.read(path, as_version=4).cells
    ]
