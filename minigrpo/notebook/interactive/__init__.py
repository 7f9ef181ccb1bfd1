"""Pages to hold in your hands, inside a notebook: each is one HTML file here, which loads nothing.

plt.show()                   # the figure that is seen where no script runs, if there is one
interactive.show("ladder")   # ladder.html takes its place where one does
"""

import html
import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent
FRAME = """<style>
@media (scripting: enabled) {{
  .jp-OutputArea-child:has(+ .jp-OutputArea-child iframe.{name}) {{ display: none; }}
}}
@media (scripting: none) {{ iframe.{name} {{ display: none; }} }}
</style>
<iframe class="{name}" title="{title}" loading="lazy"
 style="width: 100%; height: {height}px; border: 0;" srcdoc='{page}'></iframe>"""


def page(name: str, data: object = None) -> str:
    """The page `name`.html of this folder, with what all pages share and with its data as JSON."""
    stored = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    files = ("shared.css", "shared.js", f"{name}.html")
    style, shared, text = ((FOLDER / file).read_text(encoding="utf-8").strip() for file in files)
    parts = {"@STYLE@": style, "@SHARED@": shared, "@DATA@": stored}
    return re.sub("|".join(parts), lambda place: parts[place[0]], text)


def show(name: str, data: object = None, *, height: int = 700) -> None:
    """Show a page in a frame, which begins `height` pixels high."""
    from IPython.display import display

    text = page(name, data)
    title = text.partition("<title>")[2].partition("</title>")[0]
    escaped = html.escape(text, quote=False).replace("'", "&#39;")
    frame = FRAME.format(name=name, title=title, height=height, page=escaped)
    display({"text/html": frame, "text/plain": f"{title} (a page to click through)"}, raw=True)
