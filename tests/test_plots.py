"""The recurring figures draw what they are told, without a screen."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.patches import FancyBboxPatch

from minigrpo import plots


@pytest.fixture(autouse=True)
def no_screen(monkeypatch):
    """Figures stay open until the end of a test, and no longer."""
    plt.switch_backend("Agg")
    monkeypatch.setattr(plt, "show", lambda: None)
    yield
    plt.close("all")


@pytest.mark.parametrize("here", range(1, 10))
def test_course_map_lights_one_box_in_nine(here):
    plots.course_map(here)
    plt.gcf().canvas.draw()
    boxes = [patch for patch in plt.gca().patches if isinstance(patch, FancyBboxPatch)]
    blue = plt.matplotlib.colors.to_rgba(plots.BLUE)
    assert [box.get_facecolor() == blue for box in boxes] == [n == here for n in range(1, 10)]


@pytest.mark.parametrize("here", [0, 10, -1, 1.5])
def test_course_map_refuses_a_notebook_that_does_not_exist(here):
    with pytest.raises(ValueError, match=f"here: expected the number .* 1 to 9, got {here}"):
        plots.course_map(here)


def test_the_course_has_nine_notebooks_numbered_in_order():
    names = [name for _, names in plots.COURSE for name in names]
    assert [name[:2] for name in names] == [f"0{n}" for n in range(1, 10)]


def test_a_label_stands_at_the_end_of_its_line_in_its_colour():
    _, ax = plt.subplots()
    ax.plot([0, 1, 2], [5.0, 6.0, 9.0], color=plots.GREEN)
    ax.plot([0, 1], [0.0, 1.0], color=plots.PINK)
    plots.label_line(ax, "first", line=0, dy=0.5)
    plots.label_line(ax, "last")
    ax.figure.canvas.draw()
    labels = [(t.get_text(), t.xy, t.get_color()) for t in ax.texts]
    assert labels == [("first", (2, 9.5), plots.GREEN), ("last", (1, 1.0), plots.PINK)]


def test_a_level_is_a_named_horizontal_line():
    _, ax = plt.subplots()
    plots.level(ax, 3.3, "unigram entropy")
    ax.figure.canvas.draw()
    assert list(ax.get_lines()[0].get_ydata()) == [3.3, 3.3]
    assert ax.texts[0].get_text() == "unigram entropy"


def test_an_attention_grid_shows_weights_and_makes_blanks_visible():
    _, ax = plt.subplots()
    weights = torch.eye(4, requires_grad=True)
    plots.attention_grid(ax, weights, ["a", " ", "\n", "$"])
    ax.figure.canvas.draw()
    assert ax.images[0].get_array().tolist() == torch.eye(4).tolist()
    labels = [
        [label.get_text() for label in axis.get_ticklabels()] for axis in (ax.xaxis, ax.yaxis)
    ]
    assert labels == [["a", "_", r"\n", "$"]] * 2


def test_the_house_style_fits_a_page():
    plots.use_house_style()
    width, height = plt.rcParams["figure.figsize"]
    assert width <= 7 and height <= 3.5
