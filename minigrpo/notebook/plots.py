"""The house style of the figures, and the figures that recur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
BLACK, GREY = "#222222", "#9A9A9A"
"""Colors that stay apart for color-blind readers (Okabe and Ito 2008).

In gray some come close (PINK and GREY most of all), so lines differ in their dashes too.
"""


def use_house_style() -> None:
    """Set matplotlib's defaults for every figure of the course."""
    cycle = plt.cycler(color=[BLUE, ORANGE, GREEN, PINK], linestyle=["-", "--", "-.", ":"])
    plt.rc("figure", figsize=(7.0, 3.2), dpi=100, facecolor="white")
    plt.rc("figure.constrained_layout", use=True)
    plt.rc("axes", titlesize=11, titlelocation="left", prop_cycle=cycle)
    plt.rc("axes.spines", top=False, right=False)
    plt.rc("lines", linewidth=1.8)
    plt.rc("legend", frameon=False)


def label_line(ax: Axes, text: str, *, line: int = -1, dy: float = 0.0) -> None:
    """Write `text` at the right end of a line of `ax`, in its color, raised by `dy`; no legend."""
    drawn = ax.get_lines()[line]
    end = drawn.get_xdata()[-1], drawn.get_ydata()[-1] + dy
    style = dict(color=drawn.get_color(), va="center", annotation_clip=False)
    ax.annotate(text, end, xytext=(5, 0), textcoords="offset points", **style)


def level(ax: Axes, y: float, text: str) -> None:
    """Draw a thin horizontal line at `y` with its name written on it, at the right edge."""
    ax.axhline(y, color=BLACK, linewidth=1, linestyle=":")
    place = dict(xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points")
    ax.annotate(text, (1, y), **place, color=BLACK, ha="right", fontsize=9)


def seed_band(
    ax: Axes,
    runs: Sequence[Mapping[str, Any]],  # stored ones, of several seeds: "curve" -> scores by name
    score: str,
    color: str,
    dash: str = "-",
) -> None:
    """Draw a score of some runs over their steps: the mean, in a band from lowest to highest."""
    curves = [run["curve"] for run in runs]
    by_step = list(zip(*(curve[score] for curve in curves), strict=True))
    lowest, highest = [min(values) for values in by_step], [max(values) for values in by_step]
    ax.fill_between(curves[0]["step"], lowest, highest, color=color, alpha=0.2, linewidth=0)
    ax.plot(curves[0]["step"], [fmean(values) for values in by_step], color=color, linestyle=dash)


def dot_rows(
    ax: Axes,
    rows: Mapping[str, Sequence[float]],  # by name, from the top: one value per seed
    color: str = BLUE,
    *,
    hollow: bool = False,
) -> None:
    """Draw a row of dots for each name, one dot per seed; another call adds to the same rows."""
    for y, values in enumerate(rows.values()):
        fill = "white" if hollow else color
        ax.plot(values, [y] * len(values), "o", ms=4.2, mec=color, mfc=fill, mew=0.9, ls="none")
    ax.set_yticks(range(len(rows)), list(rows), fontsize=8)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)


def attention_grid(ax: Axes, weights: Tensor, labels: Sequence[str]) -> None:
    """Draw a head's weights (S, S) for S tokens: row = the token that reads, column = read."""
    ax.imshow(weights.detach().numpy(), cmap="Blues", vmin=0, vmax=1)
    shown = [label.replace(" ", "_").replace("\n", r"\n") for label in labels]
    for set_ticks in (ax.set_xticks, ax.set_yticks):
        set_ticks(range(len(shown)), shown, fontsize=8)
    ax.set(xlabel="token that is read", ylabel="token that reads")
    ax.tick_params(length=0)


STRIPS = ("#F0A868", "#FFFFFF", "#7DB8DE")  # not too dark: words stand on them


def token_strips(
    ax: Axes,
    tokens: Sequence[Sequence[str]],  # N rows of words, of any lengths
    values: Tensor,  # (N, T) or wider; what is beyond the end of a row is not looked at
    labels: Sequence[str],  # N, written to the left
    *,
    middle: float = 0.0,  # the number that stays white
    reach: float | None = None,  # from it to the full color; None = the largest there is
    digits: int = 2,  # after the point
    size: float = 7.0,  # of the words; the numbers are one smaller
) -> None:
    """Draw texts as strips of boxes, one per token, colored by a number: blue above, orange below.

    Each number is written under its token too, so that the figure can be read in gray.
    """
    shown = [row[: len(words)].tolist() for row, words in zip(values, tokens, strict=True)]
    if reach is None:
        reach = max((abs(value - middle) for row in shown for value in row), default=0.0) or 1.0
    color = LinearSegmentedColormap.from_list("strips", STRIPS, N=257)
    scale = Normalize(middle - reach, middle + reach, clip=True)
    for row, (words, numbers) in enumerate(zip(tokens, shown, strict=True)):
        for column, (word, number) in enumerate(zip(words, numbers, strict=True)):
            fill = dict(facecolor=color(scale(number)), edgecolor=GREY, lw=0.5)
            ax.add_patch(Rectangle((column, row), 0.94, 0.86, **fill))
            number = round(number, digits)
            text = f"{number:.{digits}f}" if middle else f"{number:+.{digits}f}" if number else "0"
            for y, written, large in ((0.34, word, size), (0.67, text, size - 1)):
                centered = dict(ha="center", va="center", fontsize=large)
                ax.text(column + 0.47, row + y, written, **centered)
    ax.set(xlim=(0, max(map(len, tokens))), ylim=(len(tokens), 0))
    ax.set_yticks([row + 0.43 for row in range(len(tokens))], labels, fontsize=8)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


METRICS = {  # what any dashboard shows: title of the panel, name in the clinic (and in TRL)
    "reward": ("reward", "reward (reward)"),
    "kl": ("KL (nats per token)", "KL to the reference (kl)"),
    "entropy": ("entropy (nats)", "entropy (entropy)"),
    "grad_norm": ("gradient norm", "gradient norm (grad_norm)"),
    "clipped": ("clipped (fraction)", "clipped (clip_ratio/region_mean)"),
    "mean_length": ("tokens per completion", "tokens (completions/mean_length)"),
    "truncated": ("truncated (fraction)", "truncated (completions/clipped_ratio)"),
}
PANELS = {  # of `draw_run`
    "frac_reward_zero_std": "equal groups",
    "kl": "KL (nats per token)",
    "entropy": "entropy (nats)",
    "grad_norm": "norm of the gradient",
}


def metric(m: Any, name: str) -> float | None:
    """A metric of a step or of its evaluation; None if it wasn't computed there."""
    if name == "clipped":
        return m.clip_low + m.clip_high
    return getattr(m, name) if hasattr(m, name) else m.evaluation.get(name)


def _curve(run: Sequence[Any], name: str) -> tuple[list, list]:
    """The steps and the values of a metric, where there are any."""
    points = [(m.step, y) for m in run if (y := metric(m, name)) is not None]
    return [x for x, _ in points], [y for _, y in points]


def _panel(ax: Axes, title: str) -> None:
    ax.set_title(title, fontsize=8.5)
    ax.set_xlabel("step", fontsize=8)
    ax.tick_params(labelsize=7)


def draw_run(figure: Figure, run: Sequence[Any]) -> None:
    """Draw StepMetrics: what a dashboard shows beside the reward."""
    for ax, (name, title) in zip(figure.subplots(1, 4), PANELS.items(), strict=True):
        ax.plot(*_curve(run, name))
        _panel(ax, title)
        ax.set_ylim(bottom=0)


def draw_charts(charts: Mapping[str, Any], title: str = "") -> None:
    """Draw runs, by name and with their `steps`, into the same panels, and show the figure.

    "healthy twin" is blue and wide, and lies beneath the others, of which there may be three.
    """
    styles = iter([(ORANGE, "--"), (PINK, ":"), (BLACK, "-.")])
    figure, axes = plt.subplots(2, 4, figsize=(7.0, 3.5))
    *panels, corner = axes.flat
    for name, chart in charts.items():
        twin = name == "healthy twin"
        color, dash = (BLUE, "-") if twin else next(styles)
        for ax, shown in zip(panels, METRICS, strict=True):
            drawn = _curve(chart.steps, shown)
            ax.plot(*drawn, color=color, ls=dash, lw=2.6 if twin else 1.8, zorder=3 - twin)
        corner.plot([], [], color=color, ls=dash, label=name)
    for ax, (heading, _) in zip(panels, METRICS.values()):
        _panel(ax, heading)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        drawn = [y for line in ax.get_lines() for y in line.get_ydata()]
        top = max(1.06 * ax.get_ylim()[1] * any(drawn), 0.05 * ("fraction" in heading)) or 1
        ax.set_ylim(-0.03 * top, top)  # a line at 0 lies above the axis
        if not any(drawn):  # then an axis would only mislead
            words = "0 in every step" if drawn else "not computed"
            ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", fontsize=8)
            ax.set(xticks=(), yticks=(), xlabel="")
    corner.set_axis_off()
    corner.legend(loc="center", fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    plt.show()
