"""The drawings in figures/: one style, legible on a telephone, and nothing from outside."""

import hashlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

FIGURES = Path(__file__).resolve().parent.parent / "figures"
BADGES = sorted(FIGURES.glob("badge-*.svg"))  # of README.md: small, with a style of their own
DRAWINGS = sorted({*FIGURES.glob("*.svg")} - {*BADGES})
SVG = "{http://www.w3.org/2000/svg}"
STYLE = re.compile(r" *<style>.*?</style>", re.DOTALL)
HOUSE_STYLE = STYLE.search((FIGURES / "map.svg").read_text(encoding="utf-8"))[0]
WIDTH, HEIGHT, SMALLEST = 560, 420, 15
# a font's size, wherever it is set: an attribute, an inline style, the style block, `font:`
SIZE = re.compile(r"font(?:-size)?\s*(?:=\s*\"|:)(?:\s*(?:bold|italic|\d00))*\s*([\d.]+)([a-z%]*)")


def described(text: str) -> list[str]:
    """A role, what it is, and what is in it, for people who can't see it."""
    root = ElementTree.fromstring(text)
    missing = [n for n in ("title", "desc") if not (root.findtext(SVG + n) or "").strip()]
    return missing + ["role"] * (root.get("role") != "img")


def sized(text: str) -> list[str]:
    """560 wide and at most 420 high, with the size it says in its viewBox."""
    root = ElementTree.fromstring(text)
    width, height = root.get("width"), root.get("height")
    right = root.get("viewBox") == f"0 0 {WIDTH} {height}" and width == str(WIDTH)
    return [] if right and int(height) <= HEIGHT else [f"{width} x {height}, {root.get('viewBox')}"]


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


@pytest.mark.parametrize("path", BADGES, ids=lambda path: path.name)
def test_a_badge_loads_nothing(path):
    assert self_contained(path.read_text(encoding="utf-8")) == []


RULES = (described, sized, in_style, legible, self_contained)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_drawing_keeps_the_rules(path, rule):
    assert rule(path.read_text(encoding="utf-8")) == []


def test_every_drawing_is_shown_by_a_notebook():
    notebooks = sorted((FIGURES.parent / "notebooks").glob("*.ipynb"))
    text = "".join(path.read_text("utf-8") for path in notebooks)
    names = [path.name for path in DRAWINGS if path.name != "map.svg"]  # the source of the maps
    assert [name for name in names if f'drawing(\\"{name[:-4]}\\")' not in text] == []


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_drawing_has_a_png_of_its_present_state_beside_it(path):
    png = Image.open(path.with_suffix(".png"))
    assert png.info["svg"] == hashlib.sha256(path.read_bytes()).hexdigest(), "make execute"
    assert png.width == 2 * WIDTH
