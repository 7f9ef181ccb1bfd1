"""Every check of the core: a value is checked where it enters, and trusted inside.

A check is here because without it numbers would be wrong without a word; the rest torch refuses.
"""

from collections.abc import Sequence
from numbers import Integral

from torch import Tensor


def is_whole_number(value: object) -> bool:
    """Whether this counts something: an int of Python or numpy; 2.0 and True do not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_counts(least: int = 1, **counts: object) -> None:
    """Raise ValueError for anything but a whole number of at least `least`."""
    for name, value in counts.items():
        if not is_whole_number(value) or value < least:
            raise ValueError(f"{name}: expected a whole number of {least} or more, got {value!r}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError, with what there is to choose from, for a setting that does not exist."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_shape(name: str, values: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError for another shape, which might broadcast."""
    if tuple(values.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(values.shape)}")


def check_mask(name: str, mask: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError for a mask (N, S) of another shape, or a row without a real token."""
    check_shape(name, mask, shape)
    if not mask.bool().any(dim=-1).all():
        raise ValueError(f"{name}: expected a real token in every row, got a row without one")


def check_prompts(name: str, mask: Tensor, prompt_ids: Tensor) -> None:
    """Raise ValueError unless each row (N, P) ends with a real token: padding is on the left."""
    check_shape(name, mask, prompt_ids.shape)
    if not mask.bool()[:, -1].all():
        raise ValueError(f"{name}: expected padding on the left, got some at the end of a row")


def check_log_probs(name: str, values: Tensor, shape: Sequence[int]) -> None:
    """Raise TypeError for whole numbers, ValueError for another shape."""
    if not values.is_floating_point():
        raise TypeError(f"{name}: expected floating point, got {values.dtype} (token ids?)")
    check_shape(name, values, shape)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError unless the three settings describe a distribution."""
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature: expected a finite number above 0, got {temperature} (greedy: top_k=1)"
        )
    if top_k is not None:
        check_counts(top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], or None, got {top_p}")
