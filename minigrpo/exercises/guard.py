"""Call a function of the reader's so that nothing it does reaches beyond the call.

It may print, draw random numbers, patch torch, run forever or raise whatever there is.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import math
import operator
import os
import random
import re
import signal
import sys
import textwrap
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch

PLACES = (builtins, math, random, np, np.random, torch, torch.Tensor, torch.nn, torch.nn.functional)
PLACES += (torch.nn.Module, torch.autograd, torch.autograd.Function, torch.linalg, torch.special)
PLACES += (torch.testing, torch.optim.Optimizer)
"""Modules and classes in which a name may be patched; those of the course come on top."""

KEPT = 2000
"""Characters of the output that are kept."""


class TimeIsUp(BaseException):
    """No Exception, so that a loop with `except Exception` ends too."""


class Output(io.TextIOBase):
    """What was printed, its beginning."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text[: KEPT - len(self.text)]
        return len(text)


@contextmanager
def contained(function: Callable, seconds: float, **names: Any) -> Iterator[Output]:
    """A block in which the function may be called, and after which all is as it was before.

    What the block prints is caught. After so many seconds TimeIsUp is raised in it.

    Args:
        function: whose own module is put back too.
        seconds: the limit.
        names: what these names of the function's module stand for during the block.
    """
    out = Output()
    with put_back(function), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        with torch.enable_grad(), redirect_stdout(out), redirect_stderr(out):
            # Not torch.manual_seed, which writes down a traceback for each kind of GPU, every time.
            torch.default_generator.manual_seed(0)
            warnings.simplefilter("ignore")  # they name a file and a line of this machine
            if own := getattr(function, "__globals__", None):
                own.update(names)
                # Those of a notebook end its kernel.
                own.update({name: sys.exit for name in ("exit", "quit") if name in own})
            with time_limit(seconds):
                yield out


@lru_cache(maxsize=1)
def namespaces(modules: int) -> list[tuple[Any, Any]]:
    """The places and the course's modules with their names; anew when there are more modules."""
    course = [module for name, module in sys.modules.items() if name.split(".")[0] == "minigrpo"]
    return [(place, vars(place)) for place in (*PLACES, *course)]


@contextmanager
def put_back(function: Callable) -> Iterator[None]:
    """Names, settings and random numbers that the block changes are put back after it."""
    spaces = namespaces(len(sys.modules)).copy()
    if (own := getattr(function, "__globals__", None)) is not None:
        spaces.append((None, own))
    before = [dict(space) for _, space in spaces]
    numbers, legacy, environment = random.getstate(), np.random.get_state(), dict(os.environ)
    settings = [(getter(), getter, setter) for getter, setter in SETTINGS]
    try:
        yield
    finally:
        for (place, space), old in zip(spaces, before):
            same = len(space) == len(old) and all(map(operator.is_, space.values(), old.values()))
            if not same:
                _restore(place, space, old)
        random.setstate(numbers)
        np.random.set_state(legacy)
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        for value, getter, setter in settings:
            if getter() != value:
                setter(value)


SETTINGS = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (lambda: torch.get_default_device().type, lambda kind: torch.set_default_device(None)),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (os.getcwd, os.chdir),
)
"""How a setting is read, and how it is set."""


def _restore(place: Any, space: Any, old: dict[str, Any]) -> None:
    """A class has no dictionary that can be written to; the names of a notebook have no place."""
    for name in [*space]:
        if name not in old and not isinstance(space[name], types.ModuleType):  # an import stays
            delattr(place, name) if place else space.pop(name)
    for name, value in old.items():
        if space.get(name) is not value or name not in space:
            setattr(place, name, value) if place else space.__setitem__(name, value)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the block after so many seconds, again and again until it ends."""
    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        with time_limit_without_alarms(seconds):
            yield
        return
    running, ticks, traced = True, 0, sys.gettrace()

    def up(number: int, frame: Any) -> None:
        nonlocal ticks
        ticks += 1
        if ticks % 2 and running:
            raise TimeIsUp
        # It was caught, in a loop perhaps: now a few lines later, outside of what catches it.
        lines = ticks // 2

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal lines
            lines -= event == "line"
            if lines < 0 and running:
                raise TimeIsUp
            return trace

        sys.settrace(trace)
        frame.f_trace = trace

    before = signal.signal(signal.SIGALRM, up)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), 0.05)
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if ticks > 1:
            sys.settrace(traced)


@contextmanager
def time_limit_without_alarms(seconds: float) -> Iterator[None]:
    """The same from another thread: it neither ends a call that waits inside C, such as a long
    sleep, nor a loop that catches everything.
    """
    over, here = threading.Event(), ctypes.c_ulong(threading.get_ident())
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        pause = max(seconds, 0.001)
        while not over.wait(pause):
            throw(here, ctypes.py_object(TimeIsUp))
            pause = 0.05

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        throw(here, None)  # one that was thrown too late


def describe_error(error: BaseException) -> str:
    """Type and first line, without what differs between machines."""
    name, text = type(error).__name__, ""
    with suppress(BaseException):  # the text of an exception is code as well
        text = str(error)
    first = (text.strip().splitlines() or [""])[0]
    first = re.sub(r"( at)? 0x[0-9a-fA-F]+", "", first)
    first = textwrap.shorten(first, 200, placeholder=" ...").removesuffix(".")
    return f"{name}: {first}" if first else name


def is_stub(error: BaseException) -> bool:
    """Whether a line of Python raised it: torch has a NotImplementedError too, for operations."""
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    names = traceback.tb_frame.f_code.co_names
    return isinstance(error, NotImplementedError) and "NotImplementedError" in names
