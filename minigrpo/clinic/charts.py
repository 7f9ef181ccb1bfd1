"""Charts: what is known of a run of GRPO, and the vital signs that are read from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from minigrpo.arithmetic import HARDER_LENGTHS, TRAINED_LENGTHS, ask, draw_questions
from minigrpo.clinic import smallest_tests as tests
from minigrpo.grpo import GRPOConfig, StepMetrics
from minigrpo.llama import load_policy


@dataclass(frozen=True)
class Chart:
    """What is known of a run."""

    config: GRPOConfig  # its settings, as far as they are not the bug itself
    steps: list[StepMetrics]
    policy: nn.Module | None  # at the end; None if there are no held-out questions for it
    moved: float  # how far the weights went, relative to their size
    stopped: str | None = None  # what stopped the run early

    @property
    def before(self) -> Mapping[str, float]:
        """Accuracy and tokens of thought on held-out questions; empty if there are none."""
        return _untrained() if self.policy else {}

    @cached_property
    def after(self) -> Mapping[str, float]:
        """The same at the end, asked only when somebody wants to know."""
        return _held_out(self.policy) if self.policy else {}

    def last(self, name: str, steps: int = 5) -> float:
        """Mean of a metric over the last steps; NaN if there are none."""
        values = [getattr(m, name) for m in self.steps[-steps:]]
        return sum(values) / len(values) if values and None not in values else math.nan


def _held_out(policy: nn.Module) -> Mapping[str, float]:
    """What `evaluate` finds with n = 128, as far as it is sampled and of the trained lengths."""
    generator = torch.Generator().manual_seed(0)
    questions = draw_questions(128, generator, lengths=TRAINED_LENGTHS, held_out=True)
    questions += draw_questions(64, generator, lengths=HARDER_LENGTHS, held_out=True)
    return ask(policy, questions).of_length(*TRAINED_LENGTHS)


@cache
def _untrained() -> Mapping[str, float]:
    return _held_out(load_policy())


def off_one(steps: Sequence[StepMetrics]) -> float:
    """How far the ratio is from 1."""
    return max(max(m.ratio_max - 1, 1 - m.ratio_min) for m in steps)


def luck(chart: Chart, of: Callable[[Tensor], Tensor] = lambda group: group.abs().amax()) -> float:
    """The largest advantage (`of` such a group) where all rewards of a group are equal, or NaN."""
    size, found = chart.config.group_size, []
    for m in chart.steps:
        rewards, advantages = m.rewards.view(-1, size), m.advantages.cpu().view(-1, size)
        equal = advantages[rewards.amax(1) == rewards.amin(1)]
        found += [of(group).item() for group in equal]
    return max(found, default=math.nan)


def apart(group: Tensor) -> Tensor:
    """The largest advantage of a group, less its smallest."""
    return group.amax() - group.amin()


def gap(chart: Chart) -> float:
    """Reward on the training questions, less right answers on held-out ones."""
    return chart.last("reward") - chart.after.get("accuracy", math.nan)


def reward_of(chart: Chart, which: Callable[[Tensor], Tensor]) -> float:
    """Mean reward of the shortest (torch.amin) or longest (torch.amax) prompts of the first step.

    Nothing is learned there yet. NaN if all prompts are equally long.
    """
    m = chart.steps[0]
    lengths = (m.rollouts.prompt_ids != chart.config.pad_id).sum(1)  # a mask may be the bug
    if lengths.min() == lengths.max():
        return math.nan
    return m.rewards[lengths == which(lengths)].mean().item()


def off_by_hand(chart: Chart, without_last: bool = False) -> float:
    """The largest `tests.loss_off_by_hand` of a run; NaN where it cannot be done by hand."""
    config = chart.config
    if config.inner_epochs > 1 or config.kl_weight or config.how != "token_mean":
        return math.nan
    return max(
        tests.loss_off_by_hand(
            m.loss, m.advantages.cpu(), m.rollouts.completion_mask.cpu(), without_last
        )
        for m in chart.steps
    )


VITAL_SIGNS: dict[str, Callable[[Chart], float]] = {
    "stopped by a loss that is NaN (1 = yes)": lambda chart: float(chart.stopped is not None),
    "reward, first step": lambda chart: chart.steps[0].reward,
    "reward, last steps": lambda chart: chart.last("reward"),
    "right on held-out questions, before": lambda chart: chart.before.get("accuracy", math.nan),
    "right on held-out questions, after": lambda chart: chart.after.get("accuracy", math.nan),
    "reward above right answers, at the end": gap,
    "change of the weights, of their size": lambda chart: chart.moved,
    "norm of the gradient, largest": lambda chart: max(m.grad_norm for m in chart.steps),
    "KL, first step": lambda chart: math.nan if (kl := chart.steps[0].kl) is None else kl,
    "KL, last steps": lambda chart: chart.last("kl"),
    "entropy, first step": lambda chart: chart.steps[0].entropy,
    "entropy, last steps": lambda chart: chart.last("entropy"),
    "ratio, smallest": lambda chart: min(m.ratio_min for m in chart.steps),
    "ratio, largest": lambda chart: max(m.ratio_max for m in chart.steps),
    "ratio off 1, first step": lambda chart: off_one(chart.steps[:1]),
    "ratio off 1, any step": lambda chart: off_one(chart.steps),
    "share clipped, last steps": lambda chart: chart.last("clip_low") + chart.last("clip_high"),
    "tokens per completion, last steps": lambda chart: chart.last("mean_length"),
    "share cut off at the limit": lambda chart: chart.last("truncated"),
    "largest advantage where all rewards are equal": luck,
    "... how far apart in such a group": lambda chart: luck(chart, apart),
    "loss, off the one by hand": off_by_hand,
    "... if the last token is not counted": lambda chart: off_by_hand(chart, without_last=True),
    "reward of the shortest prompts, first step": lambda chart: reward_of(chart, torch.amin),
    "reward of the longest prompts, first step": lambda chart: reward_of(chart, torch.amax),
}
"""What is measured of every run, by name. NaN where there is nothing to measure."""


def signs(**charts: Chart) -> str:
    """The vital signs of some charts side by side, one line each; those that none has are left out.

    A dash stands where there is nothing to measure.
    """
    width = max(map(len, VITAL_SIGNS))
    lines = [" " * width + "".join(f"{name:>10}" for name in charts)]
    for name, measure in VITAL_SIGNS.items():
        values = [measured(measure, chart) for chart in charts.values()]
        if any(value and not math.isnan(value) for value in values):  # somewhere it is not 0
            shown = ("-" if math.isnan(value) else f"{value:.2g}" for value in values)
            lines.append(f"{name:{width}}" + "".join(f"{value:>10}" for value in shown))
    lines += [f"{name} was stopped: {c.stopped}" for name, c in charts.items() if c.stopped]
    return "\n".join(lines)


def measured(measure: Callable[[Chart], float], chart: Chart) -> float:
    """NaN for a run that was stopped within its first step."""
    try:
        return measure(chart)
    except (IndexError, ValueError):
        return math.nan
