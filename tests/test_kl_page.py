"""The page of notebook 05 on the two KLs: its numbers are those of torch, and it can be used."""

# ruff: noqa: F811 (a fixture that is imported, and then an argument)
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_browser import CONTRAST, browser, opened, screenshot  # noqa: F401
from torch import Tensor

from minigrpo.notebook import interactive
from minigrpo.objective import kl_estimate

PAGE = Path(interactive.__file__).with_name("kl.html")
X = torch.linspace(-6, 6, 121, dtype=torch.float64)
PLACES = [(0.0, 1.0), (-2.0, 0.7), (2.4, 0.4), (-0.3, 2.3), (4.5, 3.5)]  # middle and width


def hump(middle: float | Tensor, width: float | Tensor) -> Tensor:
    return (-((X - middle) ** 2) / (2 * width**2)).log_softmax(0)


def reference() -> Tensor:
    humps = [hump(*place).exp() for place in ((-2.0, 0.7), (2.2, 0.8))]
    return (0.6 * humps[0] + 0.4 * humps[1]).log()


def policy_at(middle: float, width: float) -> tuple[Tensor, Tensor, Tensor]:
    """Its log-probs, and what it's differentiated in: the middle, and the log of the width."""
    m = torch.tensor(middle, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(width, dtype=torch.float64).log().requires_grad_()
    return hump(m, s.exp()), m, s


def push(value: Tensor, *leaves: Tensor) -> list[float]:
    return [-slope.item() for slope in torch.autograd.grad(value, leaves, retain_graph=True)]


@pytest.mark.browser
@pytest.mark.parametrize(("middle", "width"), PLACES)
def test_the_numbers_of_the_page_are_those_of_torch(opened, middle, width):
    page = opened(PAGE)
    (log_p, *leaves), ref = policy_at(middle, width), reference()
    kls = {"reverse": (log_p.exp() * (log_p - ref)).sum()}
    kls["forward"] = (ref.exp() * (ref - log_p)).sum()
    found = page.evaluate("([m, s]) => kl.divergences(m, s)", [middle, width])
    assert found == {name: pytest.approx(kl.item(), rel=1e-9) for name, kl in kls.items()}

    def pushes(name: str, draws: list[int] | None) -> list[float]:
        return page.evaluate("given => kl.pushes(...given)", [name, middle, width, draws])

    draws = [60, 61, 55, 70, 40, 60, 82, 12]
    for name in ("k1", "k2", "k3"):
        values = kl_estimate(log_p, ref, estimator=name)
        assert pushes(name, draws) == pytest.approx(push(values[draws].mean(), *leaves), rel=1e-9)
    # On average k1 pulls nowhere, k2 goes down the reverse KL, and k3 the forward KL.
    assert pushes("k1", None) == pytest.approx([0, 0], abs=1e-12)
    for name, which in (("k2", "reverse"), ("k3", "forward")):
        wanted = push(kls[which], *leaves)
        assert pushes(name, None) == pytest.approx(wanted, rel=1e-7, abs=1e-9), name


@pytest.mark.browser
def test_the_page_in_use(opened):
    page = opened(PAGE)
    page.get_by_role("button", name="Smallest reverse KL").click()
    assert page.evaluate("kl.state.m") == pytest.approx(-2, abs=0.11)
    assert "mode-seeking" in page.inner_text("#said")
    page.get_by_role("button", name="Smallest forward KL").click()
    assert page.evaluate("kl.state.s") > 2
    page.focus("#plot")
    middle, width = page.evaluate("[kl.state.m, kl.state.s]")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    assert page.evaluate("[kl.state.m, kl.state.s]") == pytest.approx([middle + 0.2, width + 0.1])
    box = page.locator("#plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 2 / 3, box["y"] + 60)
    page.mouse.up()
    assert page.evaluate("kl.state.m") == pytest.approx(2, abs=0.2)
    before = float(page.inner_text("#reverse"))
    page.locator("[data-follow=k2]").click()
    assert float(page.inner_text("#reverse")) < before
    page.get_by_role("button", name="Two starts").click()
    assert "ended at 2.3, from the left at -1.9" in page.inner_text("#said")
    page.get_by_role("button", name="A draw that was given up").click()
    assert page.inner_text("#said").startswith("One draw of 16")
    slopes = [page.evaluate(f"kl.pushes('{name}', -2, 1.4, [82])[0]") for name in ("k2", "k3")]
    assert abs(slopes[1]) > 2 * abs(slopes[0])


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 864, 1280])
def test_it_can_be_read_at_every_width(opened, width, scheme):
    page = opened(PAGE, viewport={"width": width, "height": 800}, color_scheme=scheme)
    for name in ("Smallest forward KL", "A draw that was given up"):
        page.get_by_role("button", name=name).click()
        assert [text for ratio, *text in page.evaluate(CONTRAST) if ratio < 4.5] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        screenshot(page, f"kl-{width}-{scheme}-{name[:5]}")
