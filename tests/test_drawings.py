"""The drawings in figures/: one style, legible on a telephone, and nothing from outside."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import drawings
import pytest

FIGURES = drawings.FIGURES
BADGES = sorted(FIGURES.glob("badge-*.svg"))  # of README.md: small, with a style of their own
DRAWINGS = sorted({*FIGURES.glob("*.svg")} - {*BADGES})
SVG = "{http://www.w3.org/2000/svg}"
STYLE = re.compile(r" *<style>.*?</style>", re.DOTALL)
HOUSE_STYLE = STYLE.search((FIGURES / "map.svg").read_text(encoding="utf-8"))[0]
WIDTH, HEIGHT, SMALLEST = 560, 420, 15
# a font's size, wherever it is set: an attribute, an inline style, the style block, `font:`
SIZE = re.compile(r"font(?:-size)?\s*(?:=\s*\"|:)(?:\s*(?:bold|italic|\d00))*\s*([\d.]+)([a-z%]*)")


def well_formed(text: str) -> list[str]:
    try:
        ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        return [f"not XML: {error}"]
    return []


def described(text: str) -> list[str]:
    """A role, what it is, and what is in it, for people who can't see it."""
    root = ElementTree.fromstring(text)
    found = [] if root.get("role") == "img" else ["role is not img"]
    for name in ("title", "desc"):
        if not (root.findtext(SVG + name) or "").strip():
            found.append(f"no {name}")
    return found


def sized(text: str) -> list[str]:
    """560 wide and at most 420 high, with the size it says in its viewBox."""
    root = ElementTree.fromstring(text)
    box = re.fullmatch(rf"0 0 {WIDTH} (\d+)", root.get("viewBox", ""))
    if not box:
        return [f"viewBox is {root.get('viewBox')!r}, not '0 0 {WIDTH} H'"]
    if (root.get("width"), root.get("height")) != (str(WIDTH), box[1]):
        return [f"width and height are not {WIDTH} and {box[1]}"]
    return [f"{box[1]} high, at most {HEIGHT}"] if int(box[1]) > HEIGHT else []


def in_style(text: str) -> list[str]:
    """Byte for byte the style block of map.svg, and no second one."""
    return [] if STYLE.findall(text) == [HOUSE_STYLE] else ["not the style block of map.svg"]


def legible(text: str) -> list[str]:
    """No text below 15 px: on a telephone that is 9. Nothing may be scaled down either."""
    found = [
        f"font size {size}{unit}"
        for size, unit in SIZE.findall(text)
        if unit not in ("", "px") or float(size) < SMALLEST
    ]
    return found + ["scaled"] * bool(re.search(r"\b(?:scale|matrix)\(", text))


def self_contained(text: str) -> list[str]:
    """No file, font, script or picture from elsewhere; what is referred to is defined."""
    body = text.replace(f'xmlns="{SVG[1:-1]}"', "", 1)
    found = re.findall(r"https?:|\bdata:|@import|@font-face|<!ENTITY|\bon\w+=", body)
    for element in ElementTree.fromstring(text).iter():
        name = element.tag.removeprefix(SVG)
        if name in ("script", "image", "foreignObject", "use", "iframe"):
            found.append(f"<{name}>")
    targets = re.findall(r"href\s*=\s*[\"']([^\"']*)", body) + re.findall(
        r"url\(\s*[\"']?([^\"')]*)", body
    )
    ids = {f"#{name}" for name in re.findall(r"\bid=\"([^\"]+)\"", body)}
    return found + [f"refers to {target}" for target in targets if target not in ids]


RULES = (well_formed, described, sized, in_style, legible, self_contained)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_drawing_keeps_the_rules(path, rule):
    assert rule(path.read_text(encoding="utf-8")) == []


GOOD = f"""<svg xmlns="{SVG[1:-1]}" viewBox="0 0 560 200" width="560" height="200" role="img">
  <title>One</title>
  <desc>Two.</desc>
{HOUSE_STYLE}
  <defs><marker id="tip"/></defs>
  <path class="line" marker-end="url(#tip)" d="M0,0 H9"/>
  <text class="big" x="9" y="9">three</text>
</svg>
"""
BROKEN = {
    well_formed: [("</text>", ""), ("three", "a & b"), ("three", "&nbsp;")],
    described: [
        ('role="img"', ""),
        ("<title>One</title>", "<title> </title>"),
        ("<desc>Two.</desc>", ""),
    ],
    sized: [
        ("0 0 560 200", "0 0 600 200"),
        ('viewBox="0 0 560 200"', ""),
        ('width="560"', 'width="100%"'),
        ('height="200"', 'height="210"'),
        ("200", "421"),
    ],
    in_style: [
        ("#f4f5f7", "#f4f5f8"),
        ("<style>", "<style >"),
        ("</svg>", "<style>.x { fill: red; }</style></svg>"),
        (HOUSE_STYLE, ""),
    ],
    legible: [
        ('class="big"', 'font-size="14"'),
        ('class="big"', 'style="font-size: 14.5px"'),
        ('class="big"', 'style="font: bold 12px Arial"'),
        ('class="big"', 'font-size="2em"'),
        ('class="big"', 'transform="scale(0.5)"'),
        ("font-size: 15px", "font-size: 9px"),
    ],
    self_contained: [
        ("three", '<a href="https://example.org">x</a>'),
        ('class="line"', 'style="fill: url(other.svg#a)"'),
        ("#tip)", "#tap)"),
        ("</svg>", '<image href="x.png"/></svg>'),
        ("</svg>", "<script>1</script></svg>"),
        ("</svg>", '<rect onclick="x()"/></svg>'),
        ("</svg>", '<image href="data:image/png;base64,AAAA"/></svg>'),
        (".card", "@import 'x.css'; .card"),
        (".card", "@font-face { src: local(x); } .card"),
    ],
}


def test_the_good_example_is_good():
    assert [complaint for rule in RULES for complaint in rule(GOOD)] == []
    assert set(BROKEN) == set(RULES)


@pytest.mark.parametrize(
    ("rule", "old", "new"), [(rule, *edit) for rule, edits in BROKEN.items() for edit in edits]
)
def test_a_broken_example_is_found(rule, old, new):
    assert old in GOOD
    assert rule(GOOD.replace(old, new)) != []


def out_of_date(figures: Path) -> list[str]:
    """The maps that are not what tools/drawings.py writes, and those that it doesn't write."""
    expected = drawings.maps(figures)
    there = set(figures.glob("map_*.svg"))
    stale = {path for path in there & set(expected) if path.read_text("utf-8") != expected[path]}
    return sorted(path.name for path in stale | (there ^ set(expected)))


def test_the_maps_are_what_the_tool_writes():
    assert out_of_date(FIGURES) == []


@pytest.mark.parametrize("broken", ["map_03.svg", "map_12.svg", "gone", "source"])
def test_a_map_that_is_out_of_date_is_found(tmp_path, broken):
    source = (FIGURES / "map.svg").read_text(encoding="utf-8")
    (tmp_path / "map.svg").write_text(source, "utf-8")
    for path, text in drawings.maps(tmp_path).items():
        path.write_text(text, "utf-8")
    assert out_of_date(tmp_path) == []
    if broken == "gone":
        (tmp_path / "map_09.svg").unlink()
    elif broken == "source":
        (tmp_path / "map.svg").write_text(source.replace("prompts", "questions"))
    else:
        (tmp_path / broken).write_text("<svg/>")
    assert out_of_date(tmp_path) != []


def test_each_map_lights_the_parts_of_its_notebook_and_no_other():
    source = (FIGURES / "map.svg").read_text(encoding="utf-8")
    named = [part.split() for part in drawings.PART.findall(source)]
    assert {number for part in named for number in part} == set(drawings.NUMBERS)
    for number in drawings.NUMBERS:
        text = drawings.lit(source, number)
        groups = re.findall(r'<g class="part( lit)?">', text)
        assert [bool(lit) for lit in groups] == [number in part for part in named]
        assert f"<title>Map of the course: notebook {number}</title>" in text
        # a circle with its number is lit, and no circle of another
        circles = re.findall(r'<g class="part( lit)?"><circle class="num".*?>(\d\d)</text>', text)
        assert {digits for lit, digits in circles if lit} == {number}
        assert {digits for _, digits in circles} == set(drawings.NUMBERS)


def unused(text: str) -> list[str]:
    """Drawings that no notebook shows; map.svg is the source of the others of its name."""
    names = [path.name for path in DRAWINGS if path.name != "map.svg"]
    return [name for name in names if f"../figures/{name})" not in text]


def test_every_drawing_is_shown_by_a_notebook():
    notebooks = sorted((FIGURES.parent / "notebooks").glob("*.ipynb"))
    text = "".join(path.read_text("utf-8") for path in notebooks)
    assert unused(text) == []
    assert unused(text.replace("figures/shift.svg", "figures/gone.svg")) == ["shift.svg"]
