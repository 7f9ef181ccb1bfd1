"""The clinic of notebook 08 for a browser: all that `interactive/clinic.html` can show.

Writes data/results/clinic.json, sealed so that a glance or a search gives no diagnosis away.
"""

import base64
import json
import zlib
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from textwrap import fill
from unittest.mock import Mock, patch

import store
from store import ROOT, Results, Seed, Store, of_code, of_data, of_file

from minigrpo import clinic
from minigrpo.clinic import nights
from minigrpo.clinic.measure import MEASUREMENTS
from minigrpo.clinic.patients import names, notes_by_diagnosis, numbered, records
from minigrpo.notebook import progress
from minigrpo.notebook.plots import METRICS, metric

CODE = ("bugs", "charts", "diagnosis", "measure", "nights", "patients")
FILES = ("data/tiny_llama/model.safetensors", "data/char_gpt.safetensors")
FILES += ("data/results/night.json", "minigrpo/clinic/night.md", "minigrpo/clinic/patients.md")
SEEDS = 8  # of orders of arrival


def settings() -> Results:
    """All that decides what is shown, as checksums: a patient's own setting may be its bug."""
    code = [(ROOT / "minigrpo" / "clinic" / f"{name}.py").read_text("utf-8") for name in CODE]
    config = of_data([asdict(one.config(sick=True)) for one in numbered()])
    return {"files": [of_file(ROOT / f) for f in FILES], "config": config, "code": of_code(*code)}


def patient(number: int) -> Results:
    """What is free, what each measurement prints, and what each diagnosis is told."""
    case, charts = clinic.patient(number), []
    for chart in (case.patient.chart, case.twin.chart):  # to four digits, where it's computed
        curves = {name: [metric(m, name) for m in chart.steps] for name in METRICS}
        computed = {name: ys for name, ys in curves.items() if None not in ys}
        charts.append({name: [float(f"{y:.4g}") for y in ys] for name, ys in computed.items()})
    shown, has = {"shown": str(case), "charts": charts}, case.patient.patient.name
    with patch.multiple(progress, remember=Mock(), recall=lambda section: {}):  # nothing is taken
        shown["measured"] = {name: case.measurement(name) for name in MEASUREMENTS}
        answers = {name: case._against(name) for name in names() if name != has}
        return {**shown, "has": has, "answers": answers | {has: case._explanation()}}


def arrival(name: str) -> Results:
    """What a run's header says, the log or the page or the chart, what it has, and what's told."""
    about, run, printed = records("night.md")[name], nights.stored()[name], StringIO()
    head = f"{about['told']} {run['config']} {about['setup']}"
    with redirect_stdout(printed), patch.object(nights, "draw"):
        nights.Arrival(0, name).show()
    above = fill(f"Arrival 0 of {nights.ARRIVALS}. {head}", width=96)
    shown = {"head": head, "text": printed.getvalue().removeprefix(above).strip("\n")}
    shown["chart"] = {} if shown["text"] else run["curve"]
    has, known = about["has"].split("; "), notes_by_diagnosis()
    told = [f"What decides: {about['tell']}.", *(f"Cure: {known[one]['cure']}." for one in has)]
    return {**shown, "has": has, "told": "\n".join(told)}


def measure(_: Seed) -> Results:
    """The patients, the arrivals with the orders in which they come, and what they share."""
    runs, places = sorted(nights.stored()), range(nights.ARRIVALS + 1)
    by_seed = ([clinic.night(place, seed)._name for place in places] for seed in range(SEEDS))
    found = {
        "measurements": {name: line for name, (line, _) in MEASUREMENTS.items()},
        "panels": {name: title for name, (title, _) in METRICS.items()},
        "diagnoses": names(),
        "patients": [patient(n + 1) for n in range(len(numbered()))],
        "arrivals": [arrival(name) for name in runs],
        "orders": [[runs.index(name) for name in night] for night in by_seed],
    }
    packed = zlib.compress(json.dumps(found).encode(), 9)
    return {"seed": 0, "sealed": base64.b64encode(packed).decode()}


STORE = Store("clinic.json", [Seed(0)], settings)

if __name__ == "__main__":
    store.command({"clinic": [(STORE, measure)]})
