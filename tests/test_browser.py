"""What a reader sees in a real browser: JupyterLab, and the pages of `make course`.

    make test-browser

Needs the package playwright and a Chromium of the system; see CONTRIBUTING.md.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import course
import nbformat
import pytest
from kernels import environment
from pages import documents
from test_exercise_notebooks import exercise_cells

from minigrpo.exercises.reader import find, solution_source

pytestmark = pytest.mark.browser
NOTEBOOKS = course.ROOT / "notebooks"
STEM = "02_sequence_probability"
COLORS = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}
WIDTHS = {"phone": (360, 780), "laptop": (1280, 800)}
SECONDS = 180  # a notebook may take


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    names = ("google-chrome", "chromium", "chromium-browser")
    path = next(filter(None, map(shutil.which, names)), None)
    assert path, f"no browser: expected one of {', '.join(names)}"
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def screenshot(page: object, name: str) -> None:
    """Keep a picture, if MINIGRPO_SCREENSHOTS names a folder for them."""
    if folder := os.environ.get("MINIGRPO_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder, f"{name}.png")))


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
        env=environment(**own),
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
    with suppress(OSError):
        return urllib.request.urlopen(address, timeout=5).status == 200


def wait_for(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.3)


def test_a_notebook_that_is_only_opened_shows_its_drawings_and_no_answers(browser, lab):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{lab}/lab/tree/notebooks/03_sequence_grpo.ipynb")
    page.locator(".jp-Notebook .jp-Cell").nth(100).wait_for(state="attached")

    def cell(text: str) -> object:
        found = page.locator(".jp-Notebook .jp-Cell", has_text=text).first
        found.scroll_into_view_if_needed()
        return found

    first = page.locator(".jp-InputPlaceholder").all_inner_texts()[:2]
    assert first[0].startswith("# @title Setup") and first[1].startswith("# @title Three moments")
    assert page.get_by_text("'eeeeeeeeeeeeeeeeeeeeeeee'").first.is_visible()  # the first screen
    screenshot(page, "lab-first")
    for name, words in (
        ("drawing", "One turn of GRPO. Sample"),
        ("still", "Here are the same four"),
    ):
        cell(words)
        screenshot(page, f"lab-{name}")
    pictures = "images => images.filter(i => i.naturalWidth).length"
    assert page.locator(".jp-OutputArea-output img").evaluate_all(pictures) >= 5
    run = cell('outcome("03.steps"')
    screenshot(page, "lab-closed")
    assert run.locator(".jp-OutputArea-output").count() == 0
    check = page.locator(".jp-InputPlaceholder", has_text="Our check of this section").first
    assert check.is_visible()


def test_a_reader_runs_a_notebook_and_solves_an_exercise(browser, lab):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{lab}/lab/tree/notebooks/{STEM}.ipynb")
    cells = page.locator(".jp-Notebook .jp-Cell")
    nb = nbformat.read(NOTEBOOKS / f"{STEM}.ipynb", as_version=4)
    many = len(nb.cells)
    wait_for(lambda: cells.count() == many, f"{many} cells are shown", 60)
    folded = [cell.metadata.get("jupyter", {}) for cell in nb.cells]
    expected = sum("source_hidden" in fold for fold in folded)
    assert expected and page.locator(".jp-InputPlaceholder").count() == expected

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

    stub, check = exercise_cells(nb)["2.2"]
    right = solution_source("2.2")
    unmasked = right.replace("torch.where(mask.bool(), log_probs, 0.0)", "log_probs")
    assert unmasked != right
    sentence, _ = find("2.2").slips[0]
    for source, message in ((unmasked, sentence), (right, ": passed")):
        cells.nth(stub).locator(".cm-content").click()
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(source)
        page.keyboard.press("Shift+Enter")
        cells.nth(check).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        output = cells.nth(check).locator(".jp-OutputArea-output")
        wait_for(lambda m=message, o=output: m in " ".join(o.all_inner_texts()), message, 30)
        screenshot(page, f"lab-{'passed' if source == right else 'wrong'}")


LOOK = """() => {
    const box = element => element.getBoundingClientRect();
    const drawn = math => box(math).width > 0 && box(math).height > 0;
    const fits = image => image.naturalWidth && box(image).width <= innerWidth;
    return {
        // Wide tables and code scroll in themselves; the text beside them must not.
        clipped: [...document.querySelectorAll("main, .jp-RenderedHTMLCommon")].filter(
            e => e.scrollWidth > e.clientWidth + 1).length,
        formulas: [...document.querySelectorAll("math")].filter(e => !drawn(e)).length,
        pictures: [...document.images].filter(e => !fits(e)).length,
    };
}"""


# Every text that is shown, its color and what is behind it, as [contrast, text, color, ground].
CONTRAST = """() => {
    document.querySelectorAll("details").forEach(fold => { fold.open = true; });
    const numbers = color => (color.match(/[\\d.]+/g) || []).map(  // color(srgb ...) goes up to 1
        (n, i) => color.startsWith("color(") && i < 3 ? 255 * n : Number(n));
    const over = ([r, g, b, a = 1], ground) => [r, g, b].map((c, i) => c * a + ground[i] * (1 - a));
    const bright = color => {
        const [r, g, b] = color.map(c => c / 255).map(
            c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const grounds = new Map();
    const ground = element => {
        if (!element) return matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0]
            : [255, 255, 255];
        if (!grounds.has(element)) {
            const own = numbers(getComputedStyle(element).backgroundColor);
            grounds.set(element, over(own, ground(element.parentElement)));
        }
        return grounds.get(element);
    };
    const seen = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const [text, element] = [walker.currentNode.data.trim(), walker.currentNode.parentElement];
        const shown = {opacityProperty: true, visibilityProperty: true};
        if (!text || !element.checkVisibility(shown)) continue;
        const behind = ground(element);
        const color = over(numbers(getComputedStyle(element).color), behind);
        const [low, high] = [bright(color), bright(behind)].sort((a, b) => a - b);
        const key = `${color} ${behind}`;
        if (!seen.has(key)) seen.set(key, [(high + 0.05) / (low + 0.05), text.slice(0, 40), key]);
    }
    return [...seen.values()];
}"""


def is_readable(page: object, name: str) -> None:
    """Every text stands out from its ground, and nothing is wider than the window."""
    screenshot(page, name)
    found = page.evaluate(CONTRAST)
    assert len(found) >= 2 and [text for ratio, *text in found if ratio < 4.5] == [], name
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> list[Path]:
    """The pages of all notebooks as they are committed, of the texts, and the index."""
    out = tmp_path_factory.mktemp("pages")
    course.begin(course.ROOT, out)
    paths = sorted(out.glob("*.html"))  # those that are shown in a frame have their own tests
    return [path for path in paths if 'src="course.js"' in path.read_text(encoding="utf-8")]


@pytest.fixture
def opened(browser) -> Iterator[Callable[..., object]]:
    """Opens a page without a network, and fails if it complained or asked for anything."""
    asked, said, contexts = [], [], []

    def page_of(path: Path, anchor: str = "", **settings: object) -> object:
        context = browser.new_context(offline=True, **settings)
        contexts.append(context)
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{path.name}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"{path.name}: {error}"))
        page.goto(path.as_uri() + anchor)
        return page

    yield page_of
    for context in contexts:
        context.close()
    elsewhere = [url[:80] for url in asked if not url.startswith(("file:", "data:"))]
    assert not elsewhere, f"pages load {elsewhere}"
    assert not said, f"pages complain: {said}"


def one(pages: list[Path], stem: str) -> Path:
    return next(path for path in pages if path.stem == stem)


@pytest.mark.parametrize("scheme", COLORS)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_can_be_read_without_a_network(opened, pages, width, scheme):
    size = dict(zip(("width", "height"), WIDTHS[width]))
    assert len(pages) == len(list(NOTEBOOKS.glob("*.ipynb"))) + 1 + len(documents(course.ROOT))
    for path in pages:
        page = opened(path, viewport=size, color_scheme=scheme)
        assert ground(page) == COLORS[scheme]
        seen = page.evaluate(LOOK)
        assert not any(seen.values()), f"{path.name} at {size['width']}: {seen}"
        shown = [page.locator(f".contents.{kind}").is_visible() for kind in ("column", "fold")]
        if page.locator(".contents").count():
            assert shown == [width == "laptop", width == "phone"], path.name
        is_readable(page, f"{path.stem}-{width}-{scheme}")
        page.close()


def test_a_reader_finds_a_section_and_a_word(opened, pages):
    page = opened(one(pages, "index"), viewport={"width": 1280, "height": 900})
    field, results = page.locator(".search input"), page.locator(".search li")
    page.keyboard.press("/")
    page.keyboard.type("kv cac")
    assert results.first.inner_text().startswith(("KV cache", "Optional: the KV cache"))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == results.first.text_content()
    screenshot(page, "search")
    page.keyboard.press("Escape")
    assert not results.first.is_visible()
    field.fill("no such thing at all")
    assert results.count() == 0 and page.locator(".said").inner_text() == "0 results"
    field.fill("padding")  # which is in the title of notebook 09, but isn't what LoRA is about
    texts = results.all_inner_texts()
    assert len(texts) > 2 and not any(text.startswith("LoRA") for text in texts)
    field.fill("exercise 5.3")
    page.keyboard.press("Enter")
    page.wait_for_url("**/05_kl_and_family.html#exercise-53-the-whole-loss")
    assert page.locator("#exercise-53-the-whole-loss").bounding_box()["y"] < 400
    page.locator(".search input").fill("advantage")
    page.locator(".search li", has_text="How much better a completion did").click()
    page.wait_for_url("**/glossary.html#word-advantage")
    for text, where in (("GSPO", "05_kl_and_family.html#"), ("Windows", "help.html#")):
        page.locator(".search input").fill(text)
        assert page.locator(f'.search a[href^="{where}"] small', has_text=text).count(), text


def ground(page: object) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_light_or_dark_is_the_systems_or_the_readers(opened, pages):
    path = one(pages, "07_grpo")
    for scheme, other in (("light", "dark"), ("dark", "light")):
        page = opened(path, color_scheme=scheme, java_script_enabled=False)
        assert ground(page) == COLORS[scheme]
        page = opened(path, color_scheme=scheme)
        switch = page.get_by_role("combobox", name="Colors")
        assert ground(page) == COLORS[scheme] and switch.input_value() == "auto"
        switch.select_option(other)
        is_readable(page, f"07_grpo-{other}-in-{scheme}")
        page.goto(one(pages, "glossary").as_uri(), wait_until="commit")
        page.wait_for_selector("body")  # before any script but the one in its head
        assert ground(page) == COLORS[other] and page.evaluate("localStorage.theme") == other
        page.get_by_role("combobox", name="Colors").select_option("auto")
        assert ground(page) == COLORS[scheme]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_guess_is_kept_and_stands_beside_what_came_out(opened, pages, width):
    size = dict(zip(("width", "height"), WIDTHS[width]))
    page = opened(one(pages, "03_sequence_grpo"), viewport=size)
    asked, came_out = page.locator(".guess").first, page.locator(".predict pre", has_text="steps: ")
    assert "steps: it came out at 11." in came_out.first.text_content()
    asked.locator("input").fill("7")
    asked.locator("input").press("Enter")
    page.reload()
    assert asked.inner_text() == "steps: your guess is 7." and not asked.locator("input").count()
    assert "steps: you guessed 7, and it came out at 11." in came_out.first.text_content()
    page.evaluate("() => { Storage.prototype.getItem = () => { throw Error(); }; }")  # forbidden
    page.locator(".guess input").first.fill("5")
    page.locator(".guess button").first.click()
    assert page.locator(".guess").nth(1).inner_text().endswith("your guess is 5.")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_figure_opens_and_code_is_copied(opened, pages, width):
    allowed = ["clipboard-read", "clipboard-write"]
    size = dict(zip(("width", "height"), WIDTHS[width]))
    page = opened(one(pages, "04_policy_gradient"), viewport=size, permissions=allowed)
    figure, large = page.locator("article img:visible").last, page.locator("dialog")
    for open_it in (figure.click, lambda: figure.press("Enter")):
        open_it()
        assert large.locator("img").bounding_box()["width"] >= max(700, 0.9 * size["width"])
        screenshot(page, f"enlarged-{width}")
        page.keyboard.press("Escape")
        assert not large.is_visible()
        assert page.evaluate("document.activeElement.tabIndex") == 0  # the figure has the focus
    stub = page.locator(".exercise .highlight").first
    stub.get_by_role("button").click()
    stub.get_by_text("Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("def leave_one_out(") and copied.endswith("NotImplementedError\n")


def test_tab_reaches_the_text_soon(opened, pages):
    page = opened(one(pages, "03_sequence_grpo"), viewport={"width": 1280, "height": 900})
    focused = []
    while not focused or not focused[-1][1]:
        page.keyboard.press("Tab")
        focused.append(page.evaluate(
            "[document.activeElement.textContent, !!document.activeElement.closest('article')]"
        ))  # fmt: skip
    assert focused[0][0] == "Skip to the text" and len(focused) < 10


def test_the_contents_follow_the_reader(opened, pages):
    page = opened(one(pages, "07_grpo"), viewport={"width": 1280, "height": 900})
    here = page.locator(".contents.column [aria-current=true]")
    assert page.locator(".contents.column [aria-current=page]").inner_text().startswith("07 ")
    assert here.count() == 0
    for section in ("#2-grpo-line-by-line", "#three-questions"):
        page.evaluate(f"location.hash = '{section}'")
        page.wait_for_function(
            f"document.querySelector('.column [aria-current=true]')?.hash === '{section}'"
        )
        assert here.count() == 1 and here.is_visible()
        box = here.bounding_box()
        assert 0 < box["y"] and box["y"] + box["height"] <= 900  # the column has scrolled along


def test_the_cheat_sheet_prints_on_two_pages(opened, pages):
    page = opened(one(pages, "cheatsheet"), color_scheme="dark")
    for paper in ("A4", "Letter"):
        assert sheets(page.pdf(format=paper)) == 2, paper


def sheets(pdf: bytes) -> int:
    """How many pages a PDF has that Chromium has written."""
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))


def test_a_notebook_prints_as_a_text(opened, pages):
    page = opened(one(pages, "07_grpo"), color_scheme="dark")
    page.emulate_media(media="print")
    for part in (".bar", ".contents.column", ".contents.fold", ".steps", "footer"):
        assert not page.locator(part).is_visible(), part
    seen = page.evaluate(
        """() => {
            const kind = fold => fold.matches(".predict") ? "output" : "answer";
            const shown = element => element.checkVisibility({contentVisibilityAuto: true});
            const inner = fold => [...fold.children].filter(e => e.localName !== "summary");
            return [...document.querySelectorAll("details:not(nav details)")].map(fold => [
                kind(fold), shown(fold.querySelector("summary")),
                inner(fold).some(e => e.getBoundingClientRect().height > 0 && shown(e)),
            ]);
        }"""
    )
    assert {tuple(entry) for entry in seen} == {("output", False, True), ("answer", False, False)}
    frames, pictures = page.locator("main iframe"), page.locator("main .jp-RenderedImage img")
    assert not any(frames.nth(i).is_visible() for i in range(frames.count()))
    assert all(pictures.nth(i).is_visible() for i in range(pictures.count()))
    cut = "e => e.scrollWidth > e.clientWidth + 1"
    assert page.evaluate(f"[...document.querySelectorAll('pre')].filter({cut}).length") == 0
    assert 15 <= sheets(page.pdf(format="A4")) <= 60
    page.evaluate("document.querySelector('details:not(.predict, nav details)').open = true")
    assert page.locator("details[open]:not(.predict) > *:not(summary)").first.is_visible()
