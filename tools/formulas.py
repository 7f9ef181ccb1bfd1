"""Formulas of markdown as pictures in the page: no script and no network is needed to read them.

Each is drawn by matplotlib's mathtext and written into the text as SVG, in the colour of the text
and with its baseline on that of the line. What mathtext does not know by the name that LaTeX has
for it is renamed first; what it cannot draw at all is an error.
"""

from __future__ import annotations

import html
import re

from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath, text_to_path

CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
FORMULA = re.compile(
    r"\$\$(?P<display>.+?)\$\$|\$(?!\s)(?P<inline>[^$\n]+?)(?<!\s)\$(?!\d)", re.DOTALL
)
RENAMED = (
    (r"\\[lr]vert(?![a-zA-Z])", "|"),
    (r"\\[bB]ig(?![a-zA-Z])", ""),
    (r"\\le(?![a-zA-Z])", r"\\leq"),
    (r"\\ge(?![a-zA-Z])", r"\\geq"),
    (r"\\texttt(?=\{)", r"\\mathtt"),
    (r"\\tfrac(?![a-zA-Z])", r"\\frac"),
    (r"\\(d?frac)(\w)(\w)", r"\\\1{\2}{\3}"),
    (r"\\(sqrt|mathcal) (\w)", r"\\\1{\2}"),
    (r"\s+", " "),
)
SIZE = 10.0  # of the font that is drawn
EM = SIZE / 1.15  # what becomes 1 em of the page, whose letters are larger
FONT = FontProperties(size=SIZE, math_fontfamily="stix")
STEPS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}


def with_pictures(text: str) -> str:
    """The markdown with each formula outside of code replaced by its picture.

    Raises:
        ValueError: a formula that cannot be drawn.
    """
    parts = CODE.split(text)  # code stands at the odd places
    parts[::2] = [FORMULA.sub(_picture, part) for part in parts[::2]]
    return "".join(parts)


def _picture(found: re.Match[str]) -> str:
    if found["display"] is None:
        return svg(found["inline"])
    large = re.sub(r"\\frac(?![a-zA-Z])", r"\\dfrac", found["display"])
    return f'<span class="formula">{svg(large)}</span>'


def svg(formula: str) -> str:
    """A formula, such as `x^2`, as an SVG element without line breaks.

    Raises:
        ValueError: mathtext cannot draw it.
    """
    source = formula.strip()
    for old, new in RENAMED:
        source = re.sub(old, new, source)
    try:
        drawn = TextPath((0, 0), f"${source}$", prop=FONT)
        width, height, depth = text_to_path.get_text_width_height_descent(f"${source}$", FONT, True)
    except ValueError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"formula {formula.strip()!r} cannot be drawn: {reason}") from error
    edge = 0.05 * SIZE  # strokes that reach over the box
    label = html.escape(" ".join(formula.split()), quote=True)
    return (
        f'<svg role="img" aria-label="{label}" '
        f'viewBox="0 {-(height - depth + edge):.2f} {width:.2f} {height + 2 * edge:.2f}" '
        f'style="width: {width / EM:.2f}em; vertical-align: {-(depth + edge) / EM:.2f}em">'
        f'<path fill="currentColor" transform="scale(1 -1)" d="{_outline(drawn)}"/></svg>'
    )


def _outline(drawn: Path) -> str:
    steps = []
    for points, code in drawn.iter_segments(simplify=False):
        numbers = "" if code == Path.CLOSEPOLY else " ".join(f"{n:.2f}" for n in points)
        steps.append(STEPS.get(code, "Z") + numbers)
    return "".join(steps)
