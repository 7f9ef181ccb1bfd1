"""The page of the stop tree computes what exercise 7.1 does, and autograd."""

# ruff: noqa: F811 (a fixture that is imported, and then an argument)
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_browser import CONTRAST, browser, opened, screenshot  # noqa: F401

from minigrpo.exercises.reader import find
from minigrpo.notebook import interactive

pytestmark = pytest.mark.browser
PAGE = Path(interactive.__file__).with_name("stop_tree.html").read_text(encoding="utf-8")
RUN = [
    {"step": 0, "stop": [0.53, 0.45, 0.38, 0.24], "correct": [0.1, 0.09, 0.08, 0.1, 1.0]},
    {"step": 10, "stop": [0.2, 0.14, 0.08, 0.03], "correct": [0.1, 0.1, 0.09, 0.1, 1.0]},
]
NUMBERS = """all => all.map(([stop, rewards]) =>
    [tree.worth(stop, rewards), ...tree.goingOn(stop, rewards), ...tree.gradient(stop, rewards)])"""


@pytest.fixture
def page_of(opened, tmp_path):
    def shown(run: list | None = RUN, **context) -> object:
        text = PAGE.replace("@DATA@", json.dumps(run or ""))
        (path := tmp_path / "tree.html").write_text(text, encoding="utf-8")
        return opened(path, **context)

    return shown


def test_its_numbers_are_those_of_exercise_7_1_and_of_autograd(page_of):
    generator, worth = torch.Generator().manual_seed(0), find("7.1").reference
    drawn = torch.rand(200, 11, generator=generator, dtype=torch.float64)
    trees = [(row[:D], row[D : 2 * D + 1]) for row, D in zip(drawn, 40 * [1, 2, 3, 4, 5])]
    found = page_of().evaluate(NUMBERS, [[t.tolist() for t in tree] for tree in trees])
    for (stop, rewards), mine in zip(trees, found, strict=True):
        logits = stop.logit().requires_grad_()
        worth(logits.sigmoid(), rewards).backward()
        rest = [worth(stop[d:], rewards[d:]) for d in range(1, len(stop))] + [rewards[-1]]
        exact = torch.stack([worth(stop, rewards), *rest, *logits.grad])
        torch.testing.assert_close(torch.tensor(mine, dtype=exact.dtype), exact, atol=1e-12, rtol=0)


@pytest.mark.parametrize("width, scheme", [(360, "dark"), (864, "light")])
def test_keys_move_through_the_run_and_all_can_be_read(page_of, width, scheme):
    page = page_of(viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.inner_text("#worth") == "worth 0.21" and page.inner_text("#step-o") == "0"
    page.focus("#step")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#step-o") == "10" and page.inner_text("#worth") == "worth 0.65"
    page.focus("#tree input >> nth=0")
    page.keyboard.press("Home")
    assert page.evaluate("tree.state.stop[0]") == 0 and "changed" in page.inner_text("#step-o")
    for i in range(page.locator("#tries button").count()):
        page.locator("#tries button").nth(i).click()
        low = [text for ratio, *text in page.evaluate(CONTRAST) if ratio < 4.5]
        assert low == [] and page.evaluate("document.documentElement.scrollWidth") <= width
        screenshot(page, f"stop-tree-{width}-{scheme}-{i}")


def test_the_page_works_without_a_run(page_of):
    page = page_of(None)
    page.click("#more")
    assert float(page.inner_text("#worth").split()[1]) > 0.9
