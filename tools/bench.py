"""Measure the package beside its peers on this machine: one page of ratios.

    python tools/bench.py --model FOLDER           all sections (40 minutes on two cores)
    python tools/bench.py --only sampling memory   these again, the other lines as they are
    python tools/bench.py --quick                  does it run? rough figures, nothing is written

Writes data/results/bench.json after each section. Each line says when it was measured and on which
processor, and keeps the ratios of the runs before it. The tables of docs/speed.md are made from the
same file by tools/readme.py. A section is a function in tests/benchmarks/ and runs in a process of
its own, so that none has to do with the memory or the threads of another. FOLDER is the model that
tools/smollm2.py makes; without it, the lines that need it stay as they are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "data" / "results"
BENCHMARKS = ROOT / "tests" / "benchmarks"
SECTIONS = {  # the file of each, in the order of the table
    "scoring": "speed",
    "sampling": "speed",
    "step": "speed",
    "training": "speed",
    "generate": "peers",
    "trainer": "peers",
    "grpo_peak": "peak",
    "pretraining_peak": "peak",
    "memory": "memory",
    "group_size": "growth",
    "length": "growth",
    "width": "growth",
    "vocabulary": "real_size",
    "real_model": "real_size",
    "autocast": "real_size",
}
WITH_MODEL = ("autocast",)  # sections that need --model
STOPPED = ", which stopped above it"  # a peer that never got there: its time is a lower bound
UNKNOWN = "earlier run, processor not recorded"  # of lines that don't say when and on what
EARLIER = 2  # so many runs before the last one leave their ratios in a line
GROWTH = "growth"
TABLES = {  # those of docs/speed.md, and the sections that each shows
    "speed": [*SECTIONS][:9],
    GROWTH: ["group_size", "length", "width"],
    "real size": ["vocabulary", "real_model", "autocast"],
}

Results = dict[str, Any]
Measure = Callable[[str, bool], list[Results]]


def command(section: str) -> str:
    """What measures this section alone."""
    model = " --model FOLDER" if section in WITH_MODEL else ""
    return f"python tools/bench.py --only {section}{model}"


def machine() -> Results:
    """What a ratio depends on."""

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:  # there is no TRL for Python 3.10
            return ""

    return {
        "cores": os.cpu_count(),
        "threads": int(os.environ["MINIGRPO_THREADS"]),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "trl")},
    }


def processor() -> str:
    """Its model as Linux names it, with the numbers that a name like "AMD EPYC" leaves open."""
    info = Path("/proc/cpuinfo")
    text = info.read_text("utf-8") if info.is_file() else ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.+)", text, re.MULTILINE))
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return f"{fields['model name']} ({', '.join(numbers)})"


# --------------------------------------------------------------------------------------------
# one section


def load_section(name: str) -> Callable[[bool], list[Any]]:
    """The function of a section."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return getattr(import_module(SECTIONS[name]), name)


def measure_here(name: str, quick: bool, to: Path) -> None:
    """Run a section in this process and leave its lines in a file."""
    section = load_section(name)
    if "torch" in sys.modules:  # `memory` has to stay small: it starts processes, which are larger
        from minigrpo.notebook.setup import setup

        setup(seed=0)
    to.write_text(json.dumps([line.stored() for line in section(quick)]), "utf-8")


def measure_apart(name: str, quick: bool) -> list[Results]:
    """Run a section in a process of its own; what it prints is shown as it comes."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "lines.json")
        options = ["--only", name, "--child", str(told), *(["--quick"] if quick else [])]
        subprocess.run([sys.executable, __file__, *options], cwd=ROOT, check=True)
        return json.loads(told.read_text("utf-8"))


# --------------------------------------------------------------------------------------------
# what is stored


def load(folder: Path = FOLDER) -> Results:
    """What is stored; no lines if nothing is."""
    path = folder / "bench.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {"machine": {}, "lines": []}


def merged(
    stored: list[Results], section: str, lines: list[Results], measured: str
) -> list[Results]:
    """The stored lines with those of one section in place of its old ones, in order of SECTIONS.

    A new line keeps the ratios of the one it replaces, as `earlier`, the last run first. A section
    that measured nothing (it said why) keeps its old lines; those of a section that does not exist
    any more are dropped.
    """
    if lines:
        old = {race(line): line for line in stored if line["section"] == section}
        new = [
            {**line, "section": section, "command": command(section), "measured": measured}
            for line in lines
        ]
        for line in new:
            if before := old.get(race(line)):
                ratio = {"ratio": before["ratio"], "measured": before.get("measured", UNKNOWN)}
                line["earlier"] = [ratio, *before.get("earlier", [])][:EARLIER]
        stored = [line for line in stored if line["section"] != section] + new
    order = list(SECTIONS)
    known = [line for line in stored if line["section"] in order]
    return sorted(known, key=lambda line: order.index(line["section"]))


def race(line: Results) -> tuple[str, str]:
    """What a line of a section compares with what."""
    return line["what"], line["peer"]["name"]


def save(results: Results, folder: Path = FOLDER) -> None:
    """Written in one piece."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "bench.json.part"
    text = json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False)
    part.write_text(text + "\n", "utf-8")
    part.replace(folder / "bench.json")


# --------------------------------------------------------------------------------------------
# what is shown


def number(value: float) -> str:
    """Three digits, or all of them before the point."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def cells(line: Results) -> list[str]:
    """A line of the table: what, both medians, the ratio with its range, and the target."""
    ratio, less = line["ratio"], line["better"] == "less"
    middle, low, high = (number(ratio[name]) for name in ("median", "low", "high"))
    spread = middle if low == high else f"{middle} ({low} to {high})"
    peer = number(line["peer"]["median"])
    if line["peer"]["name"].endswith(STOPPED):  # it would have taken longer, nobody knows how long
        peer = f"more than {math.floor(line['peer']['low']):,}"
        bound = math.ceil(100 * ratio["high"]) / 100 if less else math.floor(10 * ratio["low"]) / 10
        spread = f"less than {bound}" if less else f"more than {bound}"
    return [
        line["what"],
        number(line["ours"]["median"]),
        f"{peer} ({line['peer']['name']})",
        spread + (", less is better" if less else ""),
        line["target"],
    ]


def over_runs(line: Results) -> Results:
    """The line with the lowest and the highest ratio of all its runs around the last median."""
    ratios = [line["ratio"], *(before["ratio"] for before in line.get("earlier", []))]
    low, high = min(ratio["low"] for ratio in ratios), max(ratio["high"] for ratio in ratios)
    return {**line, "ratio": {**line["ratio"], "low": low, "high": high}}


def in_our_favor(line: Results) -> Results:
    """The line with a ratio that's above 1 where we do better, whatever it counts."""
    if line["better"] == "more":
        return line
    ratio = line["ratio"]
    turned = {"median": 1 / ratio["median"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}
    return {**line, "ratio": turned, "better": "more"}


def same(a: Results, b: Results) -> bool:
    """Whether two lines of a section were measured in one race that ended alike."""
    return all(a[key] == b[key] for key in ("section", "ours", "peer", "ratio"))


def distinct(lines: list[Results]) -> list[Results]:
    """The lines, those with the same numbers merged: `a, x` and `a, y` become `a, x and y`."""
    rows: list[Results] = []
    for line in lines:
        if rows and same(rows[-1], line):
            what = f"{rows[-1]['what']} and {line['what'].rpartition(', ')[2]}"
            rows[-1] = {**rows[-1], "what": what}
        else:
            rows.append(line)
    return rows


def table(results: Results, name: str) -> str:
    """For docs/speed.md: one row per line, without targets, and what they were measured with."""
    shown = [over_runs(line) for line in results["lines"] if line["section"] in TABLES[name]]
    if name == GROWTH:  # our own code on both sides, so there's no favor
        rows = ["| what | this size | half of it | growth |", "|---|---|---|---|"]
        shown = [{**line, "better": "more"} for line in shown]
    else:
        rows = ["| what | minigrpo | peer | ratio |", "|---|---|---|---|"]
        shown = [in_our_favor(line) for line in shown]
    shown = distinct(shown)
    filled = [cells(line)[:-1] for line in shown]
    runs = list(dict.fromkeys(run_of(line) for line in shown))
    if len(runs) > 1:  # a column that tells which of them a row is of
        rows = [rows[0] + " run |", rows[1] + "---|"]
        filled = [[*row, str(1 + runs.index(run_of(line)))] for row, line in zip(filled, shown)]
    rows += ["| " + " | ".join(row) + " |" for row in filled]
    below = (measured_with(results["machine"]), *told(runs, shown))
    return "\n".join([*rows, *(f"\n*{words}*" for words in below)])


def run_of(line: Results) -> str:
    """The day and the processor of a line, in words."""
    return line.get("measured", UNKNOWN)


def told(runs: list[str], lines: list[Results]) -> list[str]:
    """Below a table: the runs of its rows, and those before them that its brackets hold too."""
    sentences = []
    if len(runs) > 1:
        sentences = [f"Run {number}: {run}." for number, run in enumerate(runs, 1)]
    elif runs:
        sentences = [f"{runs[0][0].upper()}{runs[0][1:]}."]
    if before := dict.fromkeys(run_of(past) for line in lines for past in line.get("earlier", [])):
        sentences.append(f"The brackets take in the rounds of runs before: {'; '.join(before)}.")
    return [" ".join(sentences)] if sentences else []


def measured_with(on: Results) -> str:
    """Below a table: cores, threads and versions."""
    threads = "1 thread" if on["threads"] == 1 else f"{on['threads']} threads"
    names = {"python": "Python", "torch": "torch", "transformers": "transformers", "trl": "TRL"}
    versions = ", ".join(f"{name} {on[key]}" for key, name in names.items() if on[key])
    return f"{on['cores']} cores, {threads} unless a row says otherwise; {versions}."


def show(lines: list[Results]) -> None:
    """Print the lines in aligned columns."""
    rows = [("what", "minigrpo", "peer", "ratio", "target"), *map(cells, lines)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths))
        print("  ".join(padded).rstrip(), flush=True)


# --------------------------------------------------------------------------------------------


def run(sections: list[str], quick: bool, measure: Measure, folder: Path = FOLDER) -> list[Results]:
    """Measure these sections; each is stored when it is done, unless the run is a quick one.

    Raises:
        ValueError: some sections only, while the other lines are of another machine.
    """
    here, stored = machine(), load(folder)
    measured = f"{datetime.date.today()}, {processor()}"
    results: Results = {"machine": here, "lines": stored["lines"]}
    if stored["machine"] != here:
        if not quick and stored["lines"] and set(sections) != set(SECTIONS):
            raise ValueError(
                f"the stored lines were measured with {stored['machine']}, and this is {here}: "
                "measure all sections"
            )
        results["lines"] = []
    new_lines = []
    for section in sections:
        print(f"{section} ...", flush=True)
        began = time.perf_counter()
        lines = measure(section, quick)
        print(f"  {section}: {time.perf_counter() - began:.0f} s", flush=True)
        new_lines += lines
        results["lines"] = merged(results["lines"], section, lines, measured)
        if not quick:
            save(results, folder)
    return new_lines


def main(arguments: list[str] | None = None, measure: Measure = measure_apart) -> None:
    """Measure, store and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections alone")
    parser.add_argument("--quick", action="store_true", help="rough figures; nothing is written")
    parser.add_argument("--model", type=Path, help="the folder that tools/smollm2.py makes")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # one section, in here
    options = parser.parse_args(arguments)
    # One thread unless told otherwise: a second one waits for the first in models this small, and
    # on a busy machine that would slow the many small calls of the plain way most.
    os.environ.setdefault("MINIGRPO_THREADS", "1")
    if options.model:
        if not options.model.is_dir():
            parser.error(f"{options.model}: no such folder (tools/smollm2.py makes it)")
        os.environ["MINIGRPO_BENCH_MODEL"] = str(options.model.resolve())
    sections = options.only or list(SECTIONS)
    if options.child:
        measure_here(sections[0], options.quick, options.child)
        return
    show(run(sections, options.quick, measure))
    if options.quick:
        print("a quick run: rough figures, nothing is written")
    else:
        print("written: data/results/bench.json; tools/readme.py brings it into docs/speed.md")


if __name__ == "__main__":
    main()
