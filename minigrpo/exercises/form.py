"""An exercise is its solution, a function, with what there is to say about it.

    @exercise("log-prob of a sequence", package=logprobs.sequence_log_probs, gradient="log_probs")
    def sequence_log_probs(log_probs, mask):
        ...

    sequence_log_probs.why = "..."  # and so on, see ATTRIBUTES

A way or a slip is a line in place of the one that begins alike, several in a tuple, or a function.
In a review the solution is a test, and the cases are versions of the code.
"""

import ast
import importlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from minigrpo.clinic.mistakes import replaced

Function = Callable[..., Any]
Edit = str | tuple | Function  # a line, several lines or (old, new) pairs, or a function
ATTRIBUTES = {  # what may be said of a solution, and what holds where it isn't
    "package": None,  # the package's own way to the same numbers
    "gradient": "",  # the arguments that the result has to be differentiable in
    "keywords": "",  # those that are passed by name
    "tolerance": 1e-4,  # relative and absolute
    "graph": False,  # backward() has to work, even if the gradient is 0
    "why": "",  # the solution is right, and the usual slip
    "right": [],  # other ways
    "wrong": {},  # a slip that people make -> what its author is told; six
    "cases": {},  # name -> arguments, the plain ones first
    "draw": None,  # random.Random -> arguments, small and within the contract
    "garbage": False,  # NaN under the mask is a corner, with a remark of its own
    "corners": {},  # name -> (arguments, what to tell who fails only there)
    "hints": "",  # one in each line, from a question to almost the answer
    "code": None,  # of a review: what is under test
    "bugs": {},  # of a review: (right line, planted line) -> cure
    "also_lines": {},  # of a review: number of a wrong line -> where it can be mended, too
    "also_right": [],  # of a review: versions
    "also_wrong": {},  # of a review: version -> what to tell a test that accepts it
}
# What several exercises say of a corner, and of another right version of the code.
GARBAGE = "Under a 0 of the mask there may be NaN, and 0 * NaN is NaN. Use torch.where first."
FAR = "With logits far apart a softmax gives 0, whose logarithm is -inf. log_softmax stays exact."
UNDERFLOW = "A tiny probability is 0 in float32, and 0/0 is NaN. Subtract log-probs, then take exp."
DIGITS = "Its last digits may differ, and what nobody promised. Compare the rest, with a tolerance."


def exercise(title: str, **more: Any) -> Callable[[Function], Function]:
    """Make a function the solution of an exercise of its file; `more` are of ATTRIBUTES."""

    def enter(solution: Function) -> Function:
        vars(solution).update(ATTRIBUTES | more, title=title)
        return solution

    return enter


@dataclass(frozen=True)
class Case:
    name: str
    arguments: tuple
    remark: str = ""  # of a corner: who fails only there has passed, and is told this
    sentence: str = ""  # of a version: what to tell a test that is wrong about it


@dataclass(frozen=True, eq=False)
class Exercise:
    """What the judge reads; everything that the file says of the solution is an attribute of it."""

    key: str  # notebook and number, such as "2.3" or "A.1"
    reference: Function = field(repr=False)  # the solution

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reference, name)

    @property
    def parameters(self) -> list[str]:
        return [*inspect.signature(self.reference).parameters]

    @cached_property
    def slips(self) -> list[tuple[str, Function]]:  # what its author is told, and the slip
        return [(said, changed(self.reference, slip)) for slip, said in self.wrong.items()]

    @cached_property
    def tried(self) -> list[Case]:
        """The cases in the order in which they are shown: by hand, at random, corners."""
        if self.code:
            return [*self._versions()]
        cases = [Case(name, arguments) for name, arguments in self.cases.items()]
        if self.draw:
            drawn = [self.draw(Random(seed)) for seed in range(30)]
            cases += [Case(f"random numbers {i}", args) for i, args in enumerate(drawn, start=1)]
        if self.garbage:
            at = self.parameters.index("mask")
            given = next(args for args in drawn if not args[at].all())
            real = given[at]
            tables = [getattr(x, "shape", ()) == real.shape and x is not real for x in given]
            spoiled = [x.where(real.bool(), torch.nan) if t else x for t, x in zip(tables, given)]
            cases.append(Case("NaN under the mask", tuple(spoiled), GARBAGE))
        return cases + [Case(name, *corner) for name, corner in self.corners.items()]

    def _versions(self) -> Iterator[Case]:
        name = "the buggy version" if len(self.bugs) == 1 else f"one of the {len(self.bugs)} bugs"
        for bug in self.bugs:
            yield Case(name, (changed(self.code, (bug,)),))
        yield Case("the right version", (self.code,))
        for version in self.also_right:
            yield Case("a version that is right too", (changed(self.code, version),), "", DIGITS)
        for version, sentence in self.also_wrong.items():
            yield Case("another bug", (changed(self.code, version),), "", sentence)

    @property
    def shown(self) -> list[str]:
        """The lines of the code to review, with all its bugs."""
        return source(changed(self.code, tuple(self.bugs))).splitlines()

    @property
    def line(self) -> tuple[int, ...]:
        """What `check` wants to hear as `line`, in a review; elsewhere there is none."""
        shown = [line.strip() for line in self.shown] if self.bugs else []
        return tuple(shown.index(planted.strip()) + 1 for _, planted in self.bugs)

    @property
    def source(self) -> str:
        """The solution with the imports that it needs, ready to be pasted in place of the stub."""
        code = source(self.reference)
        names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
        used = {n.id for n in names} - {n.id for n in names if isinstance(n.ctx, ast.Store)}
        imports = []
        for node in ast.parse(inspect.getsource(inspect.getmodule(self.reference))).body:
            here = getattr(node, "module", "") == __name__
            if isinstance(node, ast.Import | ast.ImportFrom) and not here:
                node.names = [n for n in node.names if (n.asname or n.name.split(".")[0]) in used]
                imports += [ast.unparse(node)] if node.names else []
        return "\n".join([*imports, "", "", code]) if imports else code


def changed(function: Function, edit: Edit) -> Function:
    """The function with lines of it changed, or another one in its place."""
    if callable(edit):
        return edit
    text, name = source(function), function.__name__
    for line in [edit] if isinstance(edit, str) else edit:
        old, new = line if isinstance(line, tuple) else (None, line)
        text = replaced(text, new, old)
    return compiled(text, name, dict(function.__globals__), f"<{name} with {edit}>")


def compiled(text: str, name: str, names: dict[str, Any], file: str = "<cell>") -> Function:
    """What the text defines by this name; a traceback and `inspect.getsource` find its lines."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return names[name]


def source(function: Function) -> str:
    """Without decorators."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines(keepends=True)
    return "".join(lines[next(i for i, line in enumerate(lines) if line.startswith("def ")) :])


@cache
def of_notebook(number: str) -> dict[str, Exercise]:
    """The exercises of one of `notebooks` by key, in the order of its file."""
    found = vars(importlib.import_module(f"minigrpo.exercises.{number.lower()}")).values()
    solutions, short = [f for f in found if hasattr(f, "hints")], number.lstrip("0")
    return {(key := f"{short}.{n}"): Exercise(key, f) for n, f in enumerate(solutions, start=1)}


def notebooks() -> list[str]:  # 01 and so on, and the appendix, A
    return sorted(p.stem.upper() for p in Path(__file__).parent.glob("*.py") if len(p.stem) < 3)


def numbers(random: Random, *shape: int, low: float = -2.0, high: float = 2.0) -> Tensor:
    """Float32 with two decimals, so that a message shows them as they are."""
    flat = [round(random.uniform(low, high), 2) for _ in range(torch.Size(shape).numel())]
    return torch.tensor(flat).view(shape)


def whole(random: Random, *shape: int, high: int) -> Tensor:
    """Whole numbers from 0 to high - 1."""
    flat = [random.randrange(high) for _ in range(torch.Size(shape).numel())]
    return torch.tensor(flat).view(shape)


def mask(random: Random, N: int, T: int) -> Tensor:
    """(N, T) of ones and zeros in any order, at least a one in each row; of any type."""
    ones = [random.randint(1, T) for _ in range(N)]
    rows = [random.sample([1] * n + [0] * (T - n), T) for n in ones]
    return torch.tensor(rows).to(random.choice((torch.bool, torch.long, torch.float32)))


def texts(random: Random, tables: int, low: float = -4.0, high: float = 0.0) -> list[Tensor]:
    """So many tables (N, T) of log-probs, or other numbers, and a mask."""
    N, T = random.randint(1, 4), random.randint(1, 5)
    return [*(numbers(random, N, T, low=low, high=high) for _ in range(tables)), mask(random, N, T)]
