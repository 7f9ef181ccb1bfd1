"""The bug clinic: sick runs of GRPO without names, to be measured and diagnosed."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

_WHERE = {
    "diagnosis": ("diagnoses", "patient", "table", "tally"),
    "nights": ("night",),
    "patients": ("SHORT", "record", "where_it_hurts"),
}
__all__ = sorted(name for names in _WHERE.values() for name in names)


def lazily(package: str, where: dict[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Load a module when it's asked for: the judge needs no transformers, its command no torch."""

    def load(name: str) -> Any:
        for module, names in where.items():
            if name in names:
                return getattr(import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load


__getattr__ = lazily(__name__, _WHERE)
