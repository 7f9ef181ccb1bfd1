"""Call a function of the reader's so that no accident in it reaches beyond the call.

It may print, draw random numbers, change a setting of torch, run forever, or raise what there is.
"""

import io
import random
import re
import signal
import textwrap
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import numpy as np
import torch

KEPT = 2000  # characters of the output that are kept


class TimeIsUp(BaseException):
    """No Exception, so that a loop with `except Exception` ends too."""


class Output(io.TextIOBase):
    """What was printed, its beginning, and the exception that ended the block."""

    def __init__(self) -> None:
        self.text, self.error = "", None

    def write(self, text: str) -> int:
        self.text += text[: KEPT - len(self.text)]
        return len(text)


@contextmanager
def contained(seconds: float) -> Iterator[Output]:
    """A block that draws from seed 0 and ends by TimeIsUp; its output and exception are kept."""
    out, printing = Output(), dict(vars(torch._tensor_str.PRINT_OPTS))
    state, legacy, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            # Not torch.manual_seed, which writes down a traceback for each kind of GPU, every time.
            for begin in (torch.default_generator.manual_seed, random.seed, np.random.seed):
                begin(0)
            warnings.simplefilter("ignore")  # they name a file and a line of this machine
            with redirect_stdout(out), redirect_stderr(out), time_limit(seconds):
                try:
                    yield out
                except BaseException as error:  # no more here, where the alarm still rings
                    out.error = error
    finally:
        random.setstate(state)
        np.random.set_state(legacy)
        torch.set_default_dtype(dtype)
        vars(torch._tensor_str.PRINT_OPTS).update(printing)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the block after so many seconds; Windows has no alarm that could."""

    def up(number: int, frame: object) -> None:  # not while the block is left: it would get out
        if frame.f_code.co_filename not in (__file__, contextmanager.__code__.co_filename):
            raise TimeIsUp

    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, up)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), 0.2)  # again, if it is caught
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe_error(error: BaseException) -> str:
    """Type and first line, without what differs between machines."""
    name, first = type(error).__name__, (str(error).strip().splitlines() or [""])[0]
    first = textwrap.shorten(re.sub(r"( at)? 0x[0-9a-fA-F]+", "", first), 200, placeholder=" ...")
    return f"{name}: {first}".removesuffix(".") if first else name


def is_stub(error: BaseException) -> bool:
    """Whether a line of Python raised it: torch has a NotImplementedError too, for operations."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, NotImplementedError) and "NotImplementedError" in frame.f_code.co_names
