"""Pages to hold in your hands, inside a notebook: each is one HTML file here, which loads nothing.

plt.show()                   # the figure that is seen where no script runs, if there is one
interactive.show("ladder")   # ladder.html takes its place where one does
"""

import html
from pathlib import Path

FRAME = """<style>
@media (scripting: enabled) {{
  .jp-OutputArea-child:has(+ .jp-OutputArea-child iframe.{name}) {{ display: none; }}
}}
@media (scripting: none) {{ iframe.{name} {{ display: none; }} }}
</style>
<iframe class="{name}" title="{title}" loading="lazy"
 style="width: 100%; height: {height}px; border: 0;" srcdoc='{page}'></iframe>"""


def show(name: str, page: str = "", *, height: int = 700) -> None:
    """Show a page (that of this name, if none is given) in a frame of `height` pixels."""
    from IPython.display import display

    page = page or Path(__file__).with_name(f"{name}.html").read_text(encoding="utf-8")
    title = page.partition("<title>")[2].partition("</title>")[0]
    escaped = html.escape(page, quote=False).replace("'", "&#39;")
    frame = FRAME.format(name=name, title=title, height=height, page=escaped)
    display({"text/html": frame, "text/plain": f"{title} (a page to click through)"}, raw=True)
