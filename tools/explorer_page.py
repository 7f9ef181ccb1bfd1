"""The explorer of the run in notebook 07 as a page of its own, beside the pages of the course."""

from __future__ import annotations

import html
import re
from pathlib import Path

from committed import read, write

NAVIGATION = """<body>
<nav aria-label="The course">
<a href="index.html">All notebooks</a> · <a href="{0}.html">{1}</a>
</nav>"""
FRAME = re.compile(r"""<iframe class="explorer"[^>]*? srcdoc='([^']*)'""")


def write_explorer(out: Path, notebook: str = "07_grpo") -> bool:
    """Take it out of the executed notebook in `out`; whether there is one."""
    executed, page = out / f"{notebook}.ipynb", out / "explorer.html"
    cells = read(executed).cells if executed.exists() else []
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    shown = [FRAME.search(output.get("data", {}).get("text/html", "")) for output in outputs]
    frames = [frame for frame in shown if frame]
    if frames:
        links = NAVIGATION.format(notebook, f"Notebook {notebook[:2]}")
        write(page, html.unescape(frames[0][1]).replace("<body>", links, 1))
    else:
        page.unlink(missing_ok=True)
    return bool(frames)
