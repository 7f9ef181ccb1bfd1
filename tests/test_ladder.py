"""The ladder of notebook 04: what its page computes is the gradient of `grpo_loss`."""

# ruff: noqa: F811 (a fixture that is imported, and then an argument)
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import nbformat
import pytest
import torch
from test_browser import CONTRAST, NOTEBOOKS, browser, opened, screenshot  # noqa: F401

from minigrpo.notebook import interactive
from minigrpo.objective import VARIANTS, group_advantages, grpo_loss

pytestmark = pytest.mark.browser
PAGE = Path(interactive.__file__).with_name("ladder.html")
LENGTHS = (4, 2, 3, 1)
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
REWARDS = ([1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0])
BOUNDS = {"none": {"clip": (1.0, 1e9)}, "clip": {}, "cispo": {"surrogate": "cispo"}}


def every_setting() -> Iterator[dict]:
    """All that can be switched on together: no std without a mean, no bound without a ratio."""
    usual = {"low": 0.2, "high": 0.2, "cap": 1.2}
    for baseline, divide, average, (ratio, bound) in product(
        ("none", "mean", "leave_one_out"),
        ("no", "std"),
        ("sum", "sequence_mean", "token_mean", "constant"),
        (("no", "none"), ("token", "none"), ("token", "clip"), ("token", "cispo")),
    ):
        if baseline != "none" or divide == "no":
            own = dict(baseline=baseline, divide=divide, average=average, ratio=ratio, bound=bound)
            yield {**usual, **own}
            if bound != "none":
                yield {**own, "low": 0.3, "high": 0.5, "cap": 5}


def autograd(s: dict, rewards: list[int], ratios: list[list[float]]) -> list[list[float]]:
    """Minus the gradient of the loss with respect to each log-prob."""
    old = torch.full((4, 4), -1.0).double()
    table = [row + [1.0] * (4 - len(row)) for row in ratios]
    log_probs = (old + torch.tensor(table, dtype=torch.float64).log()).requires_grad_()
    scale = {"no": "none", "std": "group"}[s["divide"]]
    given = torch.tensor(rewards).double()
    A = group_advantages(given, 4, scale=scale, baseline=s["baseline"])
    how = "constant" if s["average"] == "sum" else s["average"]  # the sum over rows alone
    terms = {"how": how, "max_length": 1 if s["average"] == "sum" else 4}
    terms |= {"clip": (s["low"], s["cap"] - 1 if s["bound"] == "cispo" else s["high"])}
    terms |= BOUNDS[s["bound"]]
    grpo_loss(log_probs, old if s["ratio"] == "token" else None, A, MASK, **terms)[0].backward()
    return [row[:n].tolist() for row, n in zip(-log_probs.grad, LENGTHS)]


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


@pytest.fixture
def page(opened):
    return opened(PAGE)


def test_the_pushes_of_the_page_are_those_of_autograd(page):
    """What is 0 has to be 0."""
    every, ratios = [*every_setting()], page.evaluate("ladder.RATIOS")
    assert len(every) == 5 * 4 * 6
    swapped = [[1 / x for x in row] for row in ratios]
    zeros = 0
    for s, rewards, table in product(every, REWARDS, (ratios, swapped)):
        given = json.dumps([s, rewards, table])
        found = flat(page.evaluate(f"ladder.pushes(...{given})"))
        exact = flat(autograd(s, rewards, table))
        assert torch.equal(found == 0, exact == 0) and (found - exact).abs().max() < 1e-12, given
        zeros += (exact == 0).sum().item()
    assert zeros > 1000


def test_the_rungs_are_those_of_the_notebook(page):
    """Its ratios and its pushes, as it prints them; and the names are the published algorithms."""
    cells = nbformat.read(NOTEBOOKS / "04_policy_gradient.ipynb", as_version=4).cells
    printed = "\n".join(o.get("text", "") for cell in cells for o in cell.get("outputs", []))
    shown = {name: settings for name, settings in page.evaluate("ladder.RUNGS")}
    for name, rows in {"ratios": page.evaluate("ladder.RATIOS"), **shown}.items():
        line = re.search(rf"^{name} +(.*)$", printed, re.MULTILINE)[1]
        if name != "ratios":
            rows = page.evaluate(f"ladder.pushes({json.dumps(rows)})")
        there = torch.tensor([float(x) for x in line.replace("|", "").split()]).double()
        assert (flat(rows) - there).abs().max() < 0.00501, name
    for name, s in page.evaluate("ladder.NAMES"):
        published = VARIANTS[name.lower().replace(". ", "_")]
        assert s["divide"] == {"none": "no", "group": "std"}[published["scale"]]
        assert s["average"] == published["how"] and s["baseline"] == "mean"
        upper = s["cap"] - 1 if s["bound"] == "cispo" else s["high"]
        assert (s["low"], upper) == published["clip"]
        assert s["bound"] == published.get("surrogate", "clip")


def test_the_switches_lead_up_the_ladder(page):
    """Rung 6 is shown at first; each switch moves what it says, and none leads to nonsense."""
    pressed = page.locator("button[aria-pressed=true]")
    assert pressed.all_inner_texts() == ["6 clip"]
    assert page.locator(".token.stopped").count() == 4
    page.click(".token >> nth=0")
    assert "far enough" in page.inner_text("#formula")
    page.click(".token >> nth=6")
    assert "against its advantage" in page.inner_text("#formula")
    for name in page.locator("#rungs button").all_inner_texts():
        page.get_by_role("button", name=name, exact=True).click()
        assert pressed.all_inner_texts() == [name]
    page.check("input[name=ratio][value=no]")
    assert page.is_disabled("input[name=bound][value=clip]")
    assert page.locator(".stopped").count() == 0
    assert pressed.all_inner_texts() == ["4 average"]
    page.check("input[name=baseline][value=none]")
    assert page.is_checked("input[name=divide][value=no]")
    page.click(".reward >> nth=1")
    assert page.inner_text(".reward >> nth=1").startswith("reward 1")
    page.focus(".token[tabindex='0']")
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    assert page.get_attribute(":focus", "data-place") == page.get_attribute(
        "[aria-selected=true]", "data-place"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 864])
def test_everything_can_be_read(opened, width, scheme):
    size = {"width": width, "height": 800}
    page = opened(PAGE, viewport=size, color_scheme=scheme)
    for name in page.locator("#rungs button, #names button").all_inner_texts():
        page.get_by_role("button", name=name, exact=True).click()
        assert [text for ratio, *text in page.evaluate(CONTRAST) if ratio < 4.5] == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        screenshot(page, f"ladder-{width}-{scheme}-{name[:1]}")
    assert page.evaluate("document.body.scrollHeight") <= 720 or width == 360
