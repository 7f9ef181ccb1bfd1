"""What a reader sees in a real browser: JupyterLab, and the pages of `make course`.

    make test-browser

Needs the package playwright and a Chromium of the system; see CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import course
import nbformat
import pytest

from minigrpo.exercises.reader import find, solution_source

pytestmark = pytest.mark.browser
NOTEBOOKS = course.ROOT / "notebooks"
STEM = "02_sequence_probability"
WIDTHS = {"phone": (390, 844), "laptop": (1280, 800)}
SECONDS = 180  # a notebook may take


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    assert path, f"no browser: expected one of {', '.join(names)}"
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def screenshot(page: object, name: str) -> None:
    """Keep a picture, if MINIGRPO_SCREENSHOTS names a folder for them."""
    if folder := os.environ.get("MINIGRPO_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder, f"{name}.png")))


# ---------------------------------------------------------------------------------------------
# JupyterLab


@pytest.fixture
def lab(tmp_path) -> Iterator[str]:
    """The address of a JupyterLab on a copy of the notebooks, with settings of its own."""
    shutil.copytree(NOTEBOOKS, tmp_path / "root" / "notebooks")
    settings = tmp_path / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    # All cells are in the page, not only those in sight.
    (settings / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))
    own = {f"JUPYTER_{k}_DIR": str(tmp_path / k) for k in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(settings.parents[1]), "IPYTHONDIR": str(tmp_path / "i")}
    own["JUPYTERLAB_WORKSPACES_DIR"] = str(tmp_path / "workspaces")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-browser", "--allow-root", f"--port={port}", "--ServerApp.ip=127.0.0.1"]
    options += ["--IdentityProvider.token=", f"--ServerApp.root_dir={tmp_path / 'root'}"]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options],
        env={**course.kernel_environment(), **own},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: answers(f"{address}/api"), "JupyterLab answers", 60)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def answers(address: str) -> bool:
    """Whether a server is up."""
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


def wait_for(condition: object, what: str, seconds: float = SECONDS) -> None:
    """Ask until it is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.3)


def place(key: str) -> tuple[int, int]:
    """Where the stub and the check of an exercise stand, counted in cells."""
    cells = nbformat.read(NOTEBOOKS / f"{STEM}.ipynb", as_version=4).cells
    code = {i: cell.source for i, cell in enumerate(cells) if cell.cell_type == "code"}
    check = next(i for i, source in code.items() if f'check("{key}"' in source)
    name = code[check].split(" = ")[0]
    stub = next(i for i, source in code.items() if f"def {name}(" in source)
    return stub, check


def test_a_reader_runs_a_notebook_and_solves_an_exercise(browser, lab):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{lab}/lab/tree/notebooks/{STEM}.ipynb")
    cells = page.locator(".jp-Notebook .jp-Cell")
    stored_cells = nbformat.read(NOTEBOOKS / f"{STEM}.ipynb", as_version=4).cells
    many = len(stored_cells)
    wait_for(lambda: cells.count() == many, f"{many} cells are shown", 60)
    folded = [cell.metadata.get("jupyter", {}) for cell in stored_cells]
    for part, key in (("Input", "source_hidden"), ("Output", "outputs_hidden")):
        expected = sum(key in fold for fold in folded)
        assert expected and page.locator(f".jp-{part}Placeholder").count() == expected, part

    def prompts() -> list[str]:
        return page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()

    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    stored = prompts()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()
    wait_for(lambda: "[*]:" in prompts(), "cells are running", 30)
    wait_for(lambda: prompts() == stored, "all cells have run, in the order of their numbers")
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0

    stub, check = place("2.4")
    right = solution_source("2.4")
    upside_down = right.replace("return (new - old)", "return (old - new)")
    assert upside_down != right
    wrong = find("2.4").wrong[0]
    for source, message in ((upside_down, wrong.sentence), (right, ": passed")):
        cells.nth(stub).locator(".cm-content").click()
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(source)
        page.keyboard.press("Shift+Enter")
        cells.nth(check).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        output = cells.nth(check).locator(".jp-OutputArea-output")
        wait_for(lambda m=message, o=output: m in " ".join(o.all_inner_texts()), message, 30)
        screenshot(page, f"lab-{'passed' if source == right else 'wrong'}")


# ---------------------------------------------------------------------------------------------
# the pages

LOOK = """() => {
    const box = element => element.getBoundingClientRect();
    const drawn = math => box(math).width > 0 && box(math).height > 0;
    const fits = image => image.naturalWidth && box(image).width <= innerWidth;
    const style = element => getComputedStyle(element);
    return {
        // Wide tables and code scroll in themselves; the text beside them must not.
        clipped: [...document.querySelectorAll(".jp-RenderedHTMLCommon")].filter(
            e => e.scrollWidth > e.clientWidth + 1).length,
        scrolls: document.documentElement.scrollWidth > innerWidth,
        formulas: [...document.querySelectorAll("math")].filter(e => !drawn(e)).length,
        pictures: [...document.images].filter(e => !fits(e)).length,
        colours: [document.body, document.documentElement].map(
            element => [style(element).backgroundColor, style(element).color]),
    };
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> list[Path]:
    """The pages of all notebooks as they are committed, the index and the glossary."""
    out = tmp_path_factory.mktemp("pages")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        course.write_page(nbformat.read(path, as_version=4), path, out, 0)
    course.write_index(NOTEBOOKS, out)
    return sorted(out.glob("*.html"))


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_can_be_read_without_a_network(browser, pages, width):
    size = dict(zip(("width", "height"), WIDTHS[width]))
    context = browser.new_context(viewport=size, offline=True)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    assert len(pages) == len(list(NOTEBOOKS.glob("*.ipynb"))) + 2
    for path in pages:
        page = context.new_page()
        page.goto(path.as_uri())
        seen = page.evaluate(LOOK)
        assert not seen["scrolls"], f"{path.name}: the text scrolls sideways at {size['width']}"
        assert not seen["clipped"], f"{path.name}: {seen['clipped']} texts are wider than the page"
        assert not seen["formulas"], f"{path.name}: {seen['formulas']} formulas are not drawn"
        assert not seen["pictures"], f"{path.name}: {seen['pictures']} figures are too wide"
        screenshot(page, f"{path.stem}-{width}")
        page.close()
    elsewhere = [url[:80] for url in asked if not url.startswith(("file:", "data:"))]
    assert not elsewhere, f"pages load {elsewhere}"


def brightness(colour: str) -> float:
    """Of `rgb(17, 17, 17)`, from 0 to 1."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / (3 * 255)


def test_pages_are_dark_on_a_dark_screen(browser, pages):
    for path in pages:
        for scheme in ("light", "dark"):
            page = browser.new_context(color_scheme=scheme, offline=True).new_page()
            page.goto(path.as_uri())
            (ground, text), _ = page.evaluate(LOOK)["colours"]
            if path.stem != "index":  # which has the colours of the browser
                assert (brightness(ground) < 0.2) == (scheme == "dark"), path.name
            assert (brightness(text) > 0.7) == (scheme == "dark"), path.name
            screenshot(page, f"{path.stem}-{scheme}")
            page.close()
