"""The recurring figures draw what they are told, without a screen."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch

from minigrpo.notebook import plots


@pytest.fixture(autouse=True)
def no_screen(monkeypatch):
    """Figures in the style of the house stay open until the end of a test, and no longer."""
    plt.switch_backend("Agg")
    monkeypatch.setattr(plt, "show", lambda: None)
    with plt.rc_context():
        plots.use_house_style()
        yield
    plt.close("all")


def test_a_band_holds_all_seeds_and_its_line_is_their_mean():
    _, ax = plt.subplots()
    runs = [{"curve": {"step": [0, 10], "accuracy": scores}} for scores in ([0.2, 0.6], [0.4, 1.0])]
    plots.seed_band(ax, runs, "accuracy", plots.GREEN, "--")
    (line,), (band,) = ax.get_lines(), ax.collections
    assert list(line.get_xdata()) == [0, 10] and line.get_linestyle() == "--"
    assert line.get_ydata() == pytest.approx([0.3, 0.8])
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners >= {(0, 0.2), (0, 0.4), (10, 0.6), (10, 1.0)}


def test_rows_of_dots_have_a_name_and_a_dot_for_each_seed_from_the_top():
    _, ax = plt.subplots()
    plots.dot_rows(ax, {"first": [0.1, 0.2, 0.3], "second": [0.9]})
    plots.dot_rows(ax, {"first": [0.5], "second": [0.6]}, plots.ORANGE, hollow=True)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["first", "second"]
    assert [list(line.get_xdata()) for line in ax.get_lines()][:2] == [[0.1, 0.2, 0.3], [0.9]]
    assert [line.get_ydata()[0] for line in ax.get_lines()] == [0, 1, 0, 1]
    assert ax.get_lines()[2].get_markerfacecolor() == "white" and ax.yaxis_inverted()


def test_token_strips_write_each_token_with_its_number_and_colour_its_sign():
    _, ax = plt.subplots()
    values = torch.tensor([[0.5, -0.25, -0.001], [1.0, float("nan"), 9.0]])
    plots.token_strips(ax, [["7", "</s>", "x"], ["1"]], values, ["first", "second"])
    written = [text.get_text() for text in ax.texts]
    assert written == ["7", "+0.50", "</s>", "-0.25", "x", "0", "1", "+1.00"]
    assert [box.get_xy() for box in ax.patches] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    red, _, blue = zip(*(box.get_facecolor()[:3] for box in ax.patches), strict=True)
    assert [b - r > 0.05 for r, b in zip(red, blue, strict=True)] == [True, False, False, True]
    assert [r - b > 0.05 for r, b in zip(red, blue, strict=True)] == [False, True, False, False]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["first", "second"]


def test_token_strips_around_one_can_share_their_colors():
    _, axes = plt.subplots(3)
    values = torch.tensor([[1.0, 1.2]])
    plots.token_strips(axes[0], [["a", "b"]], values, [""], middle=1.0, digits=1)
    assert [text.get_text() for text in axes[0].texts] == ["a", "1.0", "b", "1.2"]
    plots.token_strips(axes[1], [["a", "b"]], torch.tensor([[0.5, 1.0]]), [""])
    plots.token_strips(axes[2], [["a"]], torch.tensor([[0.5]]), [""], reach=1.0)
    one, most, half, full, alone = (box.get_facecolor() for ax in axes for box in ax.patches)
    assert one[:3] == (1, 1, 1) and alone == half != full == most


def a_step(number: int, **changes) -> SimpleNamespace:
    usual = {
        "evaluation": {}, "reward": 0.5, "frac_reward_zero_std": 0.0, "kl": 0.1, "entropy": 1.0,
        "grad_norm": 1.0, "clip_low": 0.0, "clip_high": 0.1, "mean_length": 8.0, "truncated": 0.0,
    }  # fmt: skip
    return SimpleNamespace(step=number, **{**usual, **changes})


def test_a_run_is_drawn_from_zero_and_an_uncomputed_metric_leaves_its_panel_empty():
    names = "frac_reward_zero_std kl entropy grad_norm".split()
    run = [a_step(n, **{name: n + i / 10 for i, name in enumerate(names)}) for n in (1, 2)]
    plots.draw_run(figure := plt.figure(), [*run, a_step(3, kl=None)])
    assert all(ax.get_ylim()[0] == 0 for ax in figure.axes)
    drawn = {ax.get_title("left"): ax.get_lines()[0].get_data() for ax in figure.axes}
    assert [*drawn] == [*plots.PANELS.values()]
    assert [[*axis] for axis in drawn["equal groups"]] == [[1, 2, 3], [1, 2, 0]]
    assert [[*axis] for axis in drawn["KL (nats per token)"]] == [[1, 2], [1.1, 2.1]]
    assert [[*axis] for axis in drawn["norm of the gradient"]] == [[1, 2, 3], [1.3, 2.3, 1]]


def charts_drawn(**charts: dict) -> dict:
    """By the titles of the panels, of charts with these changes; in the order of the figure."""
    charts = {name.replace("_", " "): changes for name, changes in charts.items()}
    runs = {name: SimpleNamespace(steps=[a_step(n, **changes) for n in (1, 2)])
            for name, changes in charts.items()}  # fmt: skip
    plots.draw_charts(runs, "a finding")
    return {ax.get_title() or ax.get_title("left"): ax for ax in plt.gcf().axes}


def test_charts_share_their_panels_and_the_twin_is_blue_beneath():
    values = {"reward": 0.1, "kl": 0.2, "entropy": 0.3, "grad_norm": 0.4, "mean_length": 0.6}
    values |= {"clip_low": 0.5, "clip_high": 0.25, "truncated": 0.7}
    drawn = charts_drawn(patient_4=values, healthy_twin={"kl": None})
    corner = drawn.pop("")
    assert {title: ax.get_lines()[0].get_ydata()[0] for title, ax in drawn.items()} == {
        "reward": 0.1, "KL (nats per token)": 0.2, "entropy (nats)": 0.3, "gradient norm": 0.4,
        "clipped (fraction)": 0.75, "tokens per completion": 0.6, "truncated (fraction)": 0.7,
    }  # fmt: skip
    patient, twin = drawn["reward"].get_lines()
    assert twin.get_color() == plots.BLUE and twin.get_zorder() < patient.get_zorder()
    assert len(drawn["KL (nats per token)"].get_lines()[1].get_xdata()) == 0
    assert [text.get_text() for text in corner.get_legend().texts] == ["patient 4", "healthy twin"]
    assert all(ax.get_ylim()[0] < 0 for ax in drawn.values())  # a line at 0 is seen


def test_a_panel_without_numbers_or_of_zeros_says_so_unless_another_run_has_some():
    drawn = charts_drawn(
        patient_4={"kl": None, "entropy": 0},
        healthy_twin={"kl": None, "entropy": 0, "truncated": 0.1},
    )
    said = {
        title: [text.get_text() for text in ax.texts] for title, ax in drawn.items() if ax.texts
    }
    assert said == {"KL (nats per token)": ["not computed"], "entropy (nats)": ["0 in every step"]}
    empty, full = drawn["entropy (nats)"], drawn["truncated (fraction)"]
    assert empty.get_xlabel() == "" and not len(empty.get_yticks())
    assert full.get_xlabel() == "step" and len(full.get_yticks())
    tiny = charts_drawn(patient_4={"clip_high": 5e-4, "kl": 5e-4})  # doesn't fill its panel
    assert tiny["clipped (fraction)"].get_ylim()[1] == 0.05
    assert tiny["KL (nats per token)"].get_ylim()[1] < 0.01
