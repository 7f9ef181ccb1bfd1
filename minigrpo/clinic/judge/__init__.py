"""The judge of losses: is this GRPO loss right?"""

from importlib import import_module
from typing import Any

_WHERE = {"Report": "report", "assert_grpo_loss": "verdict", "judge_loss": "verdict"}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Load what is asked for: the command itself needs no torch."""
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
