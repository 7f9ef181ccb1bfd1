"""Judge functions of other projects; data/results/judged.json keeps the verdicts, and no code.

    python tools/experiments/judge_field.py FOLDER [--again]

What today's judge has judged is kept, without --again. FOLDER has files *.jsonl with a line for
each function; a later line with the same id adds to it. A line has:

    id        a name of its own
    call      file.py:function, an adapter in FOLDER that the judge can call
    kind      loss or advantages
    truth     what it is by hand: right, notes, variant or mistake
    which     the names of its notes or mistakes; also_defensible, other truths
    project, repo (owner/name), commit (or tag), path, line: where it is
    date, function, setting: when, its name there, and how it was set
    upstream  what is said there: [{"what": "PR 12, merged", "url": "https://..."}]
    remark    a sentence for the page
    listed    false: counted and not named, like what lacks repo, commit, path or line

If anything but a mistake is called one, the exit code is 1.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import store
from store import Store

from minigrpo.clinic.catalogue import NAMED, NOTES, VARIANTS, cut_off, dual_clip, k3_up_to
from minigrpo.clinic.judge.report import judge_file
from minigrpo.clinic.judge.verdict import PER_TOKEN

FILE = "judged.json"
PLACE = ("repo", "commit", "path", "line")
KNOWN = ("id", "kind", "truth", "also_defensible")
SHOWN = ("project", *PLACE, "date", "function", "setting", "which", "upstream", "remark")
SAID = ("judge", "verdict", "mistakes", "notes")
WORDS = {"right": "right", "notes": "right, with notes", "unknown": "a variant it doesn't know"}
WORDS |= {"mistake": "mistake", "not judged": "not judged"}
TRUTHS = {"right": "right", "notes": WORDS["notes"], "variant": "a variant", "mistake": "mistake"}

Row = dict[str, Any]


class Function(NamedTuple):
    """Of another project."""

    id: str


def field(folder: Path) -> list[Row]:
    """The lines of a folder, one for each function."""
    found: dict[str, Row] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in map(json.loads, filter(str.strip, file.read_text("utf-8").splitlines())):
            found.setdefault(line["id"], {}).update(line)
    return [*found.values()]


def told(line: Row) -> Row:
    """What is stored of a function beside the verdict."""
    named = line.get("listed", True) and all(map(line.get, PLACE))
    row = {key: line[key] for key in KNOWN + SHOWN * named if line.get(key)}
    return row if named else row | {"id": store.of_data(line["id"])[:12]}


def judge() -> str:
    """Which judge it is."""
    clinic = store.ROOT / "minigrpo" / "clinic"
    files = [clinic / "catalogue.py", *sorted((clinic / "judge").glob("*.py"))]
    return store.of_code(*(file.read_text("utf-8") for file in files))[:8]


def runs() -> list[Row]:
    return store.load(FILE).get("runs", [])


def listed() -> list[Row]:
    return [row for row in runs() if "repo" in row]


def false(row: Row) -> bool:
    """Called a mistake, and it is none."""
    truths = {row["truth"], *row.get("also_defensible", [])}
    return row["verdict"] == "mistake" and "mistake" not in truths


def main(arguments: list[str] | None = None) -> int:
    chosen = store.options(arguments, folder={"type": Path})
    lines = {Function(told(line)["id"]): line for line in field(chosen.folder)}
    judged, today = Store(FILE, [*lines], dict), judge()

    def measure(name: Function) -> Row:
        said = judge_file(str(chosen.folder / lines[name]["call"]), {})
        return told(lines[name]) | dict(zip(SAID, (today, said.verdict, said.mistakes, said.notes)))

    kept = [(judged.name(row), row) for row in judged.stored()]
    judged.save(told(lines[name]) | {key: row[key] for key in SAID} for name, row in kept)
    done = {name for name, row in kept if row["judge"] == today and not chosen.again}
    with ThreadPoolExecutor(2) as pool:
        asked = [name for name in lines if name not in done]
        judged.fill(measure, again=True, only=asked, over=pool.map)
    for line, row in zip(lines.values(), runs()):
        truth = f"{line['truth']}: {', '.join(line.get('which', []))}"
        said = f"{row['verdict']}: {', '.join(row['mistakes'] + row['notes'])}"
        print(f"{'FALSE' if false(row) else '':6}{line['id']:40} {truth:60.60} -> {said}")
    print(f"\n{counts()}")
    return int(any(map(false, runs())))


# docs/judged.md


def counts() -> str:
    """How many there are, and what they are by hand beside what the judge says."""
    count = Counter((row["truth"], row["verdict"]) for row in runs())
    shown = [row["project"] for row in listed()]
    text = f"The judge has been asked about {count.total()} functions. {len(shown)} of them, "
    text += f"from {len({*shown})} projects, are in the table below.\n\n"
    text += f"| by hand | {' | '.join(WORDS.values())} |\n|{'---|' * 6}"
    for truth, words in TRUTHS.items():
        text += f"\n| {words} | {' | '.join(str(count[truth, said] or '') for said in WORDS)} |"
    return text


def link(row: Row) -> str:
    return "https://github.com/{repo}/blob/{commit}/{path}#L{line}".format(**row)


def functions(rows: list[Row]) -> str:
    """Each line of code once, with the settings that it was judged with."""
    settings: dict[str, list[str]] = {}
    for row in rows:
        place = f"[`{row.get('function', row['kind'])}`]({link(row)})"
        settings.setdefault(place, []).extend(filter(None, [row.get("setting")]))
    return ", ".join(f"{k} ({', '.join(v)})" if v else k for k, v in settings.items())


def in_code(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def by_hand(row: Row) -> str:
    return in_code(row.get("which", []))


def verdict(row: Row) -> str:
    names = "; ".join(in_code(row[key]) for key in ("mistakes", "notes") if row[key])
    return WORDS[row["verdict"]] + f": {names}" * bool(names)


def remarks(row: Row) -> str:
    """What upstream says, and we where the judge says something else than we found by hand."""
    told = [f"[{one['what']}]({one['url']})" for one in row.get("upstream", [])]
    if false(row):
        told.append(f"By hand it's {TRUTHS[row['truth']]}, so the judge is wrong")
    elif not {*row["mistakes"]} <= {*row.get("which", [])}:
        told.append(f"By hand it's {by_hand(row)}")
    return ". ".join([*told, *filter(None, [row.get("remark")])])


def grouped(rows: list[Row], **last: Callable[[Row], str]) -> str:
    """A table with a line for each project, version, and content of the last columns."""

    def key(row: Row) -> tuple:
        when = row["project"].lower(), row.get("date", ""), row["commit"]
        return *when, *(cell(row) for cell in last.values())

    *said, remarks = last
    head = ["project", "version", "date", *said, "function (setting)", remarks]
    text = f"| {' | '.join(head).replace('_', ' ')} |\n|{len(head) * '---|'}"
    for (_, date, commit, *said, remarks), group in groupby(sorted(rows, key=key), key):
        alike = [*group]
        version = commit[:8] if len(commit) == 40 else commit
        cells = alike[0]["project"], version, date, *said, functions(alike), remarks
        text += f"\n| {' | '.join(cells)} |"
    return text


def table() -> str:
    return grouped(listed(), the_judge_says=verdict, upstream_and_remarks=remarks)


def missed() -> str:
    """What is a mistake by hand, and the judge doesn't call it one."""
    rows = [row for row in listed() if row["truth"] == "mistake" and row["verdict"] != "mistake"]
    return grouped(rows, by_hand=by_hand, the_judge_says=verdict, upstream_and_remarks=remarks)


def catalogue() -> dict[str, str]:
    """A sentence for each name that the judge may say."""
    told = {form.name: form.sentence for form in [*VARIANTS, *NAMED.values()]} | NOTES
    told["advantages_per_token"] = PER_TOKEN
    measured = (dual_clip(3), k3_up_to(10), cut_off(8))
    return told | {form.name: f"{form.sentence} Or another number." for form in measured}


def names() -> str:
    """What the names in the table mean."""
    told = catalogue()
    used = sorted({name for row in listed() for name in row["mistakes"] + row["notes"]})
    return "\n".join(["| name | |", "|---|---|", *(f"| `{n}` | {told[n]} |" for n in used)])


if __name__ == "__main__":
    sys.exit(main())
