"""The bug clinic: sick runs of GRPO without names, to be measured and diagnosed."""

from importlib import import_module
from typing import Any

_WHERE = {
    "diagnosis": ("Case", "diagnoses", "patient", "provenance", "table", "tally"),
    "measure": ("MEASUREMENTS",),
    "nights": ("Arrival", "night"),
    "patients": (
        "PATIENTS", "SHORT", "Patient", "numbered", "record", "run", "where_it_hurts",
    ),
    "judge": ("judge_loss",),
}  # fmt: skip
__all__ = sorted(name for names in _WHERE.values() for name in names)


def __getattr__(name: str) -> Any:
    """Load a room when it's entered: the judge of losses needs no transformers."""
    for module, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
