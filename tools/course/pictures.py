"""Take the pictures of the pages to click through, for where no script runs.

    python tools/course/pictures.py    # after `make course`; needs playwright and a Chromium

They are figures/page_NAME.png, and figures/explorer.png for README.md.
"""

from __future__ import annotations

import io
import shutil

from committed import few_colors
from listing import ROOT
from PIL import Image
from playwright.sync_api import sync_playwright

from minigrpo.files import atomic_path

PAGES = {"group_sandbox": 560, "stop_tree": 620, "episode": 760, "clinic": 620}  # name -> height


def main() -> None:
    names = ("google-chrome", "chromium", "chromium-browser")
    path = next(filter(None, map(shutil.which, names)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, height in {**PAGES, "explorer": 640}.items():
            wide = 1100 if name == "explorer" else 600
            size = {"width": wide, "height": height}
            page = browser.new_page(viewport=size, device_scale_factor=2, color_scheme="light")
            page.goto((ROOT / "build" / "course" / f"{name}.html").as_uri())
            page.evaluate("document.querySelector('nav')?.remove()")
            taken = Image.open(io.BytesIO(page.screenshot()))
            picture = "explorer" if name == "explorer" else f"page_{name}"
            with atomic_path(ROOT / "figures" / f"{picture}.png") as unfinished:
                few_colors(taken).save(unfinished, "PNG", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
