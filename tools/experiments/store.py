"""A file of measured runs: what is stored with today's settings, and what is still missing.

And what decides how a run went, as checksums: folders, data, the code of functions.
"""

import argparse
import ast
import inspect
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from minigrpo.files import atomic_path
from minigrpo.notebook.setup import setup

os.environ.setdefault("MINIGRPO_THREADS", "1")  # two are no faster for models so small

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "data" / "results"

Results = dict[str, Any]
Measure = Callable[[Any], Results]


class Seed(NamedTuple):
    """The name of a run that varies nothing else."""

    seed: int


class Part(NamedTuple):
    """The name of several measurements that are made together."""

    part: str


@dataclass
class Store:
    """Runs in data/results/. A run has the fields of its name, which is one of `wanted`."""

    file: str
    wanted: Sequence[NamedTuple]
    settings: Callable[[], Results]  # all that decides how the runs go
    at: tuple[str, ...] = ()  # the keys that lead to them, where a file has several parts
    key: str = "runs"

    def part(self) -> Results:
        """What the file has that was made with today's settings; empty if there is nothing."""
        found = load(self.file)
        for key in self.at:
            found = found.get(key, {})
        same = found.get("settings") == json.loads(json.dumps(self.settings()))
        return found if same else {}

    def stored(self) -> list[Results]:
        """The runs that were made with these settings, in the order wanted."""
        runs = {self.name(run): run for run in self.part().get(self.key, ())}
        return [runs[name] for name in self.wanted if name in runs]

    def name(self, run: Results) -> Any:
        """Which run it is."""
        kind = type(self.wanted[0])
        return kind(*(run[field] for field in kind._fields))

    def save(self, runs: Iterable[Results], **beside: Any) -> None:
        """Written in one piece, in the order wanted; and what else belongs beside the runs."""
        runs = sorted(runs, key=lambda run: self.wanted.index(self.name(run)))
        part = {"settings": self.settings(), **self.part(), **beside, self.key: runs}
        whole = place = load(self.file) if self.at else part
        for key in self.at[:-1]:
            place = place.setdefault(key, {})
        if self.at:
            place[self.at[-1]] = part
        with atomic_path(FOLDER / self.file) as unfinished:
            unfinished.write_text(lines(whole) + "\n", "utf-8")

    def fill(
        self,
        measure: Measure,
        again: bool = False,  # also what is stored
        only: Sequence[NamedTuple] | None = None,  # these of the runs wanted
        over: Callable[[Measure, list], Iterable[Results]] = map,
        **beside: Any,
    ) -> None:
        """Measure what is missing. Each run is saved when it's done, in place of an older one."""
        done = () if again else [self.name(run) for run in self.stored()]
        asked = self.wanted if only is None else only
        for run in over(measure, [name for name in asked if name not in done]):
            name = self.name(run)
            self.save([*(r for r in self.stored() if self.name(r) != name), run], **beside)
            print("stored:", *self.at, *name, flush=True)


def options(
    arguments: list[str] | None, parts: Iterable[str] = (), **more: Mapping[str, Any]
) -> argparse.Namespace:
    """What the command line says: --again, --only where there are parts, and more arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true", help="also what is stored")
    if parts:
        parser.add_argument("--only", nargs="+", choices=[*parts], default=[*parts])
    for name, settings in more.items():
        parser.add_argument(name, **settings)
    return parser.parse_args(arguments)


def command(
    parts: Mapping[str, Iterable[tuple[Store, Measure]]],
    arguments: list[str] | None = None,
    over: Callable[[Measure, list], Iterable[Results]] = map,
) -> None:
    """That of a tool: measure what is missing, of all parts or of those named."""
    chosen = options(arguments, parts)
    setup(seed=0)
    for one, measure in (pair for name in chosen.only for pair in parts[name]):
        one.fill(measure, chosen.again, over=over)


def load(file: str) -> Results:
    """What a file holds; empty if there is none."""
    path = FOLDER / file
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def lines(part: Results) -> str:
    """JSON with a line for each run."""

    def value(one: Any) -> str:
        if isinstance(one, list):
            return "[\n" + ",\n".join(f"  {json.dumps(run)}" for run in one) + "]"
        return json.dumps(one) if "settings" in part else lines(one)

    return "{" + ",\n".join(f"{json.dumps(key)}: {value(one)}" for key, one in part.items()) + "}"


def in_parallel(measure: Measure, names: list) -> Iterator[Results]:
    """For `fill`: two runs at a time, if there are two cores."""
    with multiprocessing.get_context("spawn").Pool(min(2, os.cpu_count() or 1)) as pool:
        yield from pool.imap_unordered(measure, names)


def keep(curve: dict[str, list], step: int, scores: Mapping[str, float]) -> None:
    """One more point of a curve, its scores rounded to four digits."""
    for name, value in {"step": step, **scores}.items():
        curve.setdefault(name, []).append(round(value, 4))


def final(runs: list[Results], score: str) -> list[float]:
    """The last value of each seed."""
    return [run["curve"][score][-1] for run in runs]


def spread(values: list[float], digits: int) -> str:
    """The mean, and in brackets the lowest and highest, unless they look alike."""
    mean, low, high = (f"{v:.{digits}f}" for v in (fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def table(
    columns: Mapping[str, Callable[[list[Results]], str]],
    rows: Iterable[tuple[str, list[Results]]],
) -> str:
    """For docs/results.md: a line for each row, with what the columns say of its runs."""
    lines = [f"| | seeds | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name, runs in rows:
        cells = (column(runs) for column in columns.values())
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def at_the_end(score: str, digits: int) -> Callable[[list[Results]], str]:
    """A column of `table`."""
    return lambda runs: spread(final(runs, score), digits)


def of_file(path: Path) -> str:
    """A checksum."""
    return sha256(path.read_bytes()).hexdigest()


def of_folder(folder: Path) -> str:
    """All files of a model: weights, tokenizer, chat template, settings of generation."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return of_data({path.name: of_file(path) for path in files})


def of_data(data: Any) -> str:
    """Anything that JSON can hold."""
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@cache  # a command asks again after each run
def without_layout(one: Callable[..., Any] | str) -> Any:
    return tree(ast.parse(one if isinstance(one, str) else inspect.getsource(one)))


def tree(part: Any) -> Any:
    """Of a syntax tree what JSON can hold, the same in every Python: `ast.unparse` isn't."""
    if isinstance(part, list):
        return [tree(one) for one in part]
    if not isinstance(part, ast.AST):
        return repr(part)
    if isinstance(part, ast.JoinedStr):  # Python 3.12.1 ends a nested one with an empty text
        part.values = [one for one in part.values if getattr(one, "value", None) != ""]
    fields = [[name, tree(x)] for name, x in ast.iter_fields(part) if x not in (None, [])]
    return [type(part).__name__, *fields]


def of_code(*code: Callable[..., Any] | str) -> str:
    """Of functions or source. Comments and layout don't count, so they can change."""
    return of_data([*map(without_layout, code)])
