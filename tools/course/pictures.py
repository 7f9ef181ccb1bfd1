"""Take the pictures of the pages to click through, for where no script runs.

    python tools/course/pictures.py    # after `make course`; needs playwright and a Chromium

They are figures/page_NAME.png, and figures/explorer.png for README.md.
"""

import io
import shutil

from committed import few_colors
from listing import ROOT
from PIL import Image
from playwright.sync_api import sync_playwright

from minigrpo.files import atomic_path

ABOVE = """said => {
    document.querySelector("nav")?.remove();
    if (said) document.body.insertAdjacentHTML("afterbegin", `<p><b>${said}</b></p>`);
}"""
FEWER = """() => {  // at step 7, where one of eight is right, and with less to choose from
    const step = document.querySelector("#step");
    step.value = 5;
    step.dispatchEvent(new Event("input"));
    document.querySelector("#close").click();
    document.activeElement.blur();
    scrollTo(0, 0);
    const choices = ["fieldset:has(#state)", ".card > fieldset + .line", "fieldset:has(#view)"];
    choices.push("#algorithm-text", ".card > [role=group]");
    choices.forEach(part => document.querySelector(part).remove());
}"""
STILL = "A picture. Run the cells above and this one to play."
SIZES = {  # of the window, width and height; the first are shown in notebooks, 560 wide
    "page_group_sandbox": (780, 845),
    "page_stop_tree": (620, 620),
    "page_episode": (620, 916),
    "page_clinic": (620, 640),
    "page_explorer_11": (760, 805),
    "explorer": (1100, 880),
}


def main() -> None:
    names = ("google-chrome", "chromium", "chromium-browser")
    path = next(filter(None, map(shutil.which, names)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, (width, height) in SIZES.items():
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, device_scale_factor=2, color_scheme="light")
            built = ROOT / "build" / "course" / f"{name.removeprefix('page_')}.html"
            page.goto(built.as_uri())
            page.evaluate(ABOVE, name.startswith("page_") and STILL)
            if name == "page_explorer_11":
                page.evaluate(FEWER)
            taken = Image.open(io.BytesIO(page.screenshot()))
            with atomic_path(ROOT / "figures" / f"{name}.png") as unfinished:
                few_colors(taken).save(unfinished, "PNG", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
