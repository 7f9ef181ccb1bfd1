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

PAGE = Path(interactive.__file__).with_name("stop_tree.html")
RUN = [
    {"step": 0, "stop": [0.53, 0.45, 0.38, 0.24], "correct": [0.1, 0.09, 0.08, 0.1, 1.0]},
    {"step": 10, "stop": [0.2, 0.14, 0.08, 0.03], "correct": [0.1, 0.1, 0.09, 0.1, 1.0]},
]
NUMBERS = "all => all.map(([p, r]) => [tree.worth(p, r), tree.goingOn(p, r), tree.gradient(p, r)])"


@pytest.fixture
def page_of(opened, tmp_path):
    def shown(text: str, **context) -> object:
        (path := tmp_path / "tree.html").write_text(text, encoding="utf-8")
        return opened(path, **context)

    return shown


def filled() -> str:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("@DATA@") == 1
    return text.replace("@DATA@", json.dumps(RUN))


@pytest.mark.browser
def test_the_numbers_of_the_page_are_those_of_exercise_7_1_and_of_autograd(page_of):
    generator, worth = torch.Generator().manual_seed(0), find("7.1").reference
    rand = lambda n: torch.rand(n, generator=generator, dtype=torch.float64)  # noqa: E731
    trees = [(rand(D), rand(D + 1)) for D in (1, 2, 3, 4, 5) for _ in range(40)]
    asked = [[stop.tolist(), rewards.tolist()] for stop, rewards in trees]
    found = page_of(filled()).evaluate(NUMBERS, asked)
    for (stop, rewards), (total, on, slopes) in zip(trees, found, strict=True):
        logits = stop.logit().requires_grad_()
        worth(logits.sigmoid(), rewards).backward()
        rest = [worth(stop[d:], rewards[d:]) for d in range(1, len(stop))] + [rewards[-1]]
        exact = [worth(stop, rewards), *rest, *logits.grad]
        mine = torch.tensor([total, *on, *slopes], dtype=torch.float64)
        torch.testing.assert_close(mine, torch.stack(exact), atol=1e-12, rtol=0)


@pytest.mark.browser
@pytest.mark.parametrize("width, scheme", [(360, "dark"), (864, "light")])
def test_the_page_moves_through_the_run_by_keys_and_can_be_read(page_of, width, scheme):
    page = page_of(filled(), viewport={"width": width, "height": 800}, color_scheme=scheme)
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
    page.reload()
    page.click("#up")
    assert "0.21 → 0.24" in page.inner_text("#said").replace("\u00a0", " ")


@pytest.mark.browser
def test_the_page_works_without_a_run(page_of):
    page = page_of(PAGE.read_text(encoding="utf-8"))
    page.click("#more")
    assert float(page.inner_text("#worth").split()[1]) > 0.9
