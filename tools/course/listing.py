"""The list of the course, course.toml, and what is counted in its notebooks."""

import json
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # JupyterLab and pytest bring it

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Notebook:
    """An entry of course.toml, which says what each word of it is for."""

    root: Path
    number: str
    file: str
    title: str
    path: str
    built: str
    inside: str
    card: str
    figure: str
    seconds: int
    part: str = ""
    needs: str = ""

    @property
    def location(self) -> Path:
        return self.root / "notebooks" / self.file

    @property
    def stem(self) -> str:
        return self.location.stem

    @cached_property
    def told(self) -> dict[str, str]:
        """The table under the title, such as `minutes of reading`: "70"."""
        text = "".join(json.loads(self.location.read_text("utf-8"))["cells"][0]["source"])
        lines = [line for line in text.splitlines() if line.startswith("|")]
        rows = [[entry.strip() for entry in line.strip("| ").split("|")] for line in lines]
        return dict(zip(rows[0], rows[-1])) if rows else {}

    @property
    def exercises(self) -> int:
        """How many there are; not imported, because that loads torch."""
        file = self.root / "minigrpo" / "exercises" / f"{self.number.lower()}.py"
        text = file.read_text("utf-8") if file.is_file() else ""
        return len(re.findall(r"^@exercise\(", text, re.MULTILINE))


def notebooks(root: Path = ROOT) -> list[Notebook]:
    """The notebooks of a course in order; TypeError names a word too many or too few."""
    entries = tomllib.loads((root / "course.toml").read_text("utf-8"))["notebook"]
    return [Notebook(root, **entry) for entry in entries]
