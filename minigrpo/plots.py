"""The house style of the figures, and the figures that recur."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

BLUE, ORANGE, GREEN, PINK, BLACK, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#222222",
    "#9A9A9A",
)
"""Colours that stay apart for colour-blind readers (Okabe and Ito 2008) and differ in grey."""

COURSE = (
    ("I: a policy", ("01 char GPT", "02 sequence\nprobability", "03 sequence\nGRPO")),
    ("II: the algorithm", ("04 the\nobjective", "05 a Llama\nthat answers", "06 GRPO")),
    ("III: in the wild", ("07 bug\nclinic", "08 real\nmodels", "09 scaling\nout")),
)


def use_house_style() -> None:
    """Set matplotlib's defaults for every figure of the course."""
    plt.rcParams.update(
        {
            "figure.figsize": (7.0, 3.2),
            "figure.dpi": 100,
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": plt.cycler(
                color=[BLUE, ORANGE, GREEN, PINK], linestyle=["-", "--", "-.", ":"]
            ),
            "axes.grid": False,
            "lines.linewidth": 1.8,
            "legend.frameon": False,
        }
    )


def course_map(here: int) -> None:
    """Draw the nine notebooks in their three parts, with number `here` (1 to 9) lit.

    Raises:
        ValueError: there is no such notebook.
    """
    if here not in range(1, 10):
        raise ValueError(f"here: expected the number of a notebook, 1 to 9, got {here}")
    figure, ax = plt.subplots(figsize=(7.0, 1.35))
    for part, (title, names) in enumerate(COURSE):
        ax.text(3 * part + 0.03, 1.12, title, fontsize=9, weight="bold", color=BLACK)
        for i, name in enumerate(names):
            number = 3 * part + i
            lit = number + 1 == here
            ax.add_patch(
                FancyBboxPatch(
                    (number + 0.06, 0.06),
                    0.86,
                    0.86,
                    boxstyle="round,pad=0.02",
                    facecolor=BLUE if lit else "white",
                    edgecolor=BLUE if lit else GREY,
                )
            )
            ax.text(
                number + 0.49,
                0.49,
                name,
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if lit else BLACK,
                weight="bold" if lit else "normal",
            )
    ax.set(xlim=(0, 9), ylim=(0, 1.35))
    ax.axis("off")
    plt.show()


def label_line(ax: Axes, text: str, *, line: int = -1, dy: float = 0.0) -> None:
    """Write `text` at the right end of a line of `ax`, in its colour: better than a legend.

    line: which of the lines drawn so far; dy: lift, in units of the y axis.
    """
    drawn = ax.get_lines()[line]
    x, y = drawn.get_xdata()[-1], drawn.get_ydata()[-1]
    ax.annotate(
        text,
        (x, y + dy),
        xytext=(5, 0),
        textcoords="offset points",
        color=drawn.get_color(),
        va="center",
        annotation_clip=False,
    )


def level(ax: Axes, y: float, text: str, color: str = BLACK) -> None:
    """Draw a thin horizontal line at `y` with its name written on it, at the right edge."""
    ax.axhline(y, color=color, linewidth=1, linestyle=":")
    ax.annotate(
        text,
        (1, y),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        color=color,
        ha="right",
        fontsize=9,
    )


def attention_grid(ax: Axes, weights: Tensor, labels: Sequence[str]) -> None:
    """Draw one head's attention weights as a grid: row = the token that reads, column = read.

    weights (S, S), labels: the S tokens.
    """
    ax.imshow(weights.detach().numpy(), cmap="Blues", vmin=0, vmax=1)
    shown = [repr(label)[1:-1] if label.isspace() else label for label in labels]
    shown = ["_" if label == " " else label for label in shown]
    ax.set_xticks(range(len(shown)), shown, fontsize=8)
    ax.set_yticks(range(len(shown)), shown, fontsize=8)
    ax.set(xlabel="token that is read", ylabel="token that reads")
    ax.tick_params(length=0)
