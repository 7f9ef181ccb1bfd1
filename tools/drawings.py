"""Write the maps of the course: figures/map.svg, with what each notebook is about lit.

    python tools/drawings.py

In figures/map.svg a group names the notebooks it belongs to, `class="part" data-notebooks="03 07"`.
In figures/map_03.svg the groups that name 03 have the class `lit` as well; nothing else differs but
the title.
"""

from __future__ import annotations

import re
from pathlib import Path

FIGURES = Path(__file__).resolve().parent.parent / "figures"
NUMBERS = [f"{k:02}" for k in range(1, 12)]
PART = re.compile(r'class="part" data-notebooks="([\d ]*)"')


def lit(source: str, number: str) -> str:
    """The map, with the parts of one notebook lit."""

    def light(part: re.Match[str]) -> str:
        return f'class="{"part lit" if number in part[1].split() else "part"}"'

    title = "<title>Map of the course"
    return PART.sub(light, source).replace(title, f"{title}: notebook {number}")


def maps(figures: Path = FIGURES) -> dict[Path, str]:
    """The text of map_01.svg to map_11.svg."""
    source = (figures / "map.svg").read_text(encoding="utf-8")
    return {figures / f"map_{number}.svg": lit(source, number) for number in NUMBERS}


def main() -> None:
    for path, text in maps().items():
        path.write_text(text, encoding="utf-8", newline="\n")
        print(path.relative_to(FIGURES.parent))


if __name__ == "__main__":
    main()
