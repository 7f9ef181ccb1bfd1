"""The judge in a test of your own: `assert_grpo_loss(loss)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minigrpo.clinic.judge.verdict import judge_loss


def assert_grpo_loss(function: Callable | str, **given: Any) -> None:
    """AssertionError with the report unless the loss is right; `given` as for `judge_loss`.

    A loss that the judge doesn't know fails too, or a mistake without a name would pass. For a
    variant of your own, `assert not judge_loss(loss).mistakes` asks for less.
    """
    __tracebackhide__ = True  # pytest then shows the line that called it
    report = judge_loss(function, **given)
    if not report.passed:
        raise AssertionError(report.text)
