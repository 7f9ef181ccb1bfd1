"""The blind diagnosis: `patient(7)` is a chart without a name, `diagnose(7, "...")` the answer."""

from __future__ import annotations

import hashlib
import html
import math
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from minigrpo.arithmetic import Arithmetic
from minigrpo.clinic.charts import Chart, measured, signs
from minigrpo.clinic.patients import PATIENTS, WARDS, Patient, complaint, run


@dataclass(frozen=True)
class Case:
    """A patient without a name: the chart of the sick run, and the healthy one beside it."""

    number: int
    told: str  # the task, and how the settings of both runs differ from `SHORT`
    sick: Chart
    healthy: Chart

    def __str__(self) -> str:
        """What the patient tells, and the vital signs of both."""
        return f"Patient {self.number}. {self.told}\n" + signs(healthy=self.healthy, sick=self.sick)


def numbered() -> tuple[Patient, ...]:
    """The patients in the order of their numbers, which gives nothing away."""
    return tuple(
        sorted(PATIENTS, key=lambda patient: hashlib.sha256(patient.name.encode()).hexdigest())
    )


@cache
def patient(number: int, seed: int = 3) -> Case:
    """Run the patient with this number, 1 to 22, and the healthy code under the same settings."""
    one = _record(number)
    about = str(one.task.__doc__).splitlines()[0]
    task = "The sums of notebook 07." if one.task is Arithmetic else about
    other = [f"{name} = {value}" for name, value in one.settings.items() if name != "steps"]
    changed = f" but for {', '.join(other)}" if other else ""
    told = f"{task} {one.config(sick=False).steps} steps, with the settings of SHORT{changed}."
    return Case(number, told, run(one, seed), run(one, seed, sick=False))


def diagnose(number: int, name: str, seed: int = 3) -> None:
    """Print whether this, one of the names in `PATIENTS`, is what the patient has, and why."""
    print(judge(number, name, seed)[1])


def judge(number: int, name: str, seed: int = 3) -> tuple[bool, str]:
    """Whether the diagnosis is right, and what is to be said about it."""
    one, names = _record(number), {known.name.lower(): known for known in PATIENTS}
    if not name.strip(" ."):
        return False, f"Patient {number} waits for a diagnosis."
    named = names.get(" ".join(name.lower().split()))
    if named is None:
        near = get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        meant = f" Is {near[0]!r} meant?" if near else ""
        return False, f"No diagnosis is called {name!r}.{meant} The names are in the list above."
    case = patient(number, seed)
    here, healthy = _reading(named, case.sick), _reading(named, case.healthy)
    if named is one:
        return True, (
            f"Patient {number}: {named.name}. Right.\n"
            f"The evidence: {named.sign}.\n"
            f"{named.vital_sign}: {here}, and {healthy} in the healthy run.\n"
            f"The test that decides: {named.question} With the bug it says\n"
            f"    {complaint(named)}\n"
            f"The cure: {named.cure}."
        )
    return False, (
        f"Patient {number}: not {named.name}. Its sign would be: {named.sign}.\n"
        f"{named.vital_sign}: {here} here, and {healthy} in the healthy run. "
        + _against(named, one, case)
        + ("\nThe ward is the right one." if named.ward == one.ward else "")
    )


def _record(number: int) -> Patient:
    if number not in range(1, len(PATIENTS) + 1):
        raise ValueError(f"number: expected 1 to {len(PATIENTS)}, got {number!r}")
    return numbered()[number - 1]


def _reading(named: Patient, chart: Chart) -> str:
    """The number that decides, read from a chart."""
    value = measured(named.statistic, chart)
    return "not to be measured" if math.isnan(value) else f"{value:.2g}"


def _against(named: Patient, one: Patient, case: Case) -> str:
    """Why a wrong diagnosis is not the right one."""
    theirs, here = named.config(sick=False), one.config(sick=False)
    unmet = [
        f"{name} = {value}"
        for name, value in named.settings.items()
        if name != "steps" and getattr(here, name) != getattr(theirs, name)
    ]
    if named.base is not one.base:
        return "That sign belongs to another model and task: here the number says nothing."
    if unmet:
        return f"That sign is read with {', '.join(unmet)}: here the number says nothing."
    if not named.is_sick(case.sick):
        side = "above" if named.above else "below"
        return f"Those who have it are {side} {named.threshold:g}."
    if named.is_sick(case.healthy):
        return "Under these settings the healthy are there too, so it says nothing."
    return "It fits, but something else on the chart fits better: what else is out of order?"


# --------------------------------------------------------------------------------------------
# the page to keep


def table() -> str:
    """Symptom, likely causes, sign, test and cure as an HTML table."""
    rows = ["<tr><th>symptom</th><th>likely cause</th><th>sign</th><th>test</th><th>cure</th></tr>"]
    for ward in WARDS:
        ill = [one for one in PATIENTS if one.ward == ward]
        for one in ill:
            cells = [one.name, one.sign, one.question, one.cure]
            first = f'<td rowspan="{len(ill)}"><b>{html.escape(ward)}</b></td>'
            row = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            rows.append(f"<tr>{first if one is ill[0] else ''}{row}</tr>")
    return "<table>\n" + "\n".join(rows) + "\n</table>"
