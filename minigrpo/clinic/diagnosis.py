"""The blind diagnosis: look at a patient, measure, make up your mind, and only then be told."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import groupby

from minigrpo.checks import is_whole_number
from minigrpo.clinic import measure as measuring
from minigrpo.clinic.charts import Readings, dashboard, shown, side_by_side
from minigrpo.clinic.measure import MEASUREMENTS, Subject
from minigrpo.clinic.patients import Patient, names, notes_by_diagnosis, numbered
from minigrpo.notebook import progress
from minigrpo.notebook.plots import draw_charts

BUDGET = 3
"""Measurements per patient."""
FIRST_SEED = 25
"""Every patient has a seed of its own: its number and this. So a healthy one can be unlucky."""


@dataclass(eq=False)
class Case:
    """A patient without a name, with its healthy twin beside it."""

    number: int
    patient: Subject = field(repr=False)
    _trained: bool = field(default=False, repr=False)  # which takes its time

    @property
    def measured(self) -> list[str]:
        """The measurements that were taken, in any kernel, in their order."""
        keys = (key.partition(": ") for key in progress.recall("clinic"))
        return [name for number, _, name in keys if name and number == str(self.number)]

    @property
    def _answer(self) -> str | None:
        """The first one, in any kernel."""
        return progress.recall("clinic").get(str(self.number), {}).get("answer")

    @property
    def twin(self) -> Subject:
        """Its healthy twin; `case.twin.chart.steps` are that run's."""
        return self.patient.twin

    def __str__(self) -> str:
        """What the patient tells, and what any dashboard shows of both."""
        self._announce()
        setting, stopped = self.patient.patient.setting, self.patient.chart.stopped
        c = setting.config
        lines = [
            f"Patient {self.number}. {setting.told}",
            f"{c.steps} steps of {c.prompts_per_step} prompts x {c.group_size} completions of at "
            f"most {c.max_new_tokens} tokens, {c.inner_epochs} updates per batch.",
            f"Clip {c.clip[0]:g}, KL weight {c.kl_weight:g}, entropy weight {c.entropy_weight:g}. "
            "The twin has the same settings and another seed.",
            "Each pair of numbers: first step (its updates averaged), mean of the last three.",
            "",
            side_by_side({w: dashboard(s.chart) for w, s in self._both.items()}),
        ]
        if stopped:
            stopped = stopped.replace("the ratio is between 1 and 1", "every ratio is 1")
            lines.append(f"The patient was stopped: {stopped}.")
        return "\n".join(lines)

    @property
    def _both(self) -> dict[str, Subject]:
        return {f"patient {self.number}": self.patient, "healthy twin": self.twin}

    def _announce(self) -> None:
        if not self._trained:
            print(f"Patient {self.number} and its twin are trained first, for some seconds.")
            self._trained = True

    def chart(self) -> None:
        """Draw the free panels: what any dashboard shows."""
        self._announce()
        draw_charts({w: s.chart for w, s in self._both.items()})

    def measure(self, name: int | str = "") -> None:
        """Print one measurement, patient beside twin; without a name, list them all."""
        print(self.measurement(name))

    def measurement(self, name: int | str = "") -> str:
        """What `measure` prints."""
        if not isinstance(name, str):
            return f"Measurements have names, and {name!r} is none. case.measure() lists them."
        dots = bool(name.strip()) and not name.strip(". ")  # a blank that isn't filled in
        name = " ".join(name.lower().split()).strip(". ")
        left = BUDGET - len(self.measured)
        if dots:
            return f"Patient {self.number}: {left} of {BUDGET} left. case.measure() lists them."
        if not name:
            lines = [f'  "{known}": {line}' for known, (line, _) in MEASUREMENTS.items()]
            used = f" Used: {', '.join(self.measured)}." if self.measured else ""
            free = "Yours are free now" if self._answer else f"You have {left} of {BUDGET} left"
            return "\n".join([f"{free} for patient {self.number}.{used}", *lines])
        if name not in MEASUREMENTS:
            near = [f"Did you mean {n!r}?" for n in get_close_matches(name, MEASUREMENTS, 1, 0.4)]
            more = "".join(near) or "case.measure() lists them."
            return f"There's no measurement called {name!r}. {more}"
        if name not in self.measured and not left and not self._answer:
            return (
                f"You've used your {BUDGET} measurements of patient {self.number}: "
                f"{', '.join(self.measured)}. Time for case.diagnose(...)."
            )
        results = {who: MEASUREMENTS[name][1](s) for who, s in self._both.items()}
        empty = _says_nothing(next(iter(results.values())))
        if not empty:
            progress.remember("clinic", f"{self.number}: {name}", {})
        free = "nothing here, so it's free; " if empty else ""
        left = f"{free}{max(0, BUDGET - len(self.measured))} of {BUDGET} measurements left"
        left = "free now" if self._answer else left
        head = f"{name}, patient {self.number} ({left})"
        texts = {who: result for who, result in results.items() if isinstance(result, str)}
        if len({*texts.values()}) == 1 and len(texts) == len(results):
            return f"{head}\n{texts.popitem()[1]}"
        lines = [f"{who}: {text}".replace(": \n", ":\n") for who, text in texts.items()]
        rest = {who: result for who, result in results.items() if who not in texts}
        return "\n".join([head, *lines, *([side_by_side(rest)] if rest else [])])

    def diagnose(self, answer: int | str = "") -> None:
        """Print whether this diagnosis, a number or a name, is right, and why."""
        print(self.judged(answer))

    def judged(self, answer: int | str = "") -> str:
        """What `diagnose` prints."""
        if isinstance(answer, str) and not answer.strip(" ."):
            return f"Patient {self.number} waits for a diagnosis. clinic.diagnoses() lists them."
        name, trouble = named(answer)
        if name is None:
            return trouble
        patient, first = self.patient.patient, self._first(name)
        note = "" if first == name else f"\nYour first answer counts, and it was {first!r}."
        if name == patient.name:
            return f"Patient {self.number}: {name}. Right.\n{self._explanation()}{note}"
        note += "\nThis patient's measurements are free now."
        return f"Patient {self.number}: {name!r} isn't it.\n{self._against(name)}{note}"

    def reveal(self) -> None:
        """Give up: print what a right diagnosis is told."""
        self._first("given up")
        print(f"Patient {self.number}: {self.patient.patient.name}.\n{self._explanation()}")

    def _first(self, name: str) -> str | None:
        """Keep the first answer, and what was measured before it; returns the answer."""
        right, measured = name == self.patient.patient.name, self.measured
        value = {"answer": name, "right": right, "measured": measured}
        progress.remember("clinic", str(self.number), value)
        return self._answer

    def _explanation(self) -> str:
        patient = self.patient.patient
        lines = [
            f"What: {patient.what}.",
            f"Its sign: {patient.sign}.",
            *([self._evidence(patient)] if patient.sign_read else []),
            f"The smallest test: {patient.question}",
            f"Cure: {patient.cure}.",
            f"Harm at these settings: {patient.harm}.",
            f"Provenance: {provenance(patient)}.",
        ]
        return "\n".join(lines)

    def _read(self, ill: Patient) -> list[float]:
        """The reading that decides about a bug, of patient and twin."""
        at = ill.sign_read
        where = at.measurement, at.reading, at.index
        return [measuring.reading(subject, *where) for subject in self._both.values()]

    def _evidence(self, ill: Patient) -> str:
        """This reading, in words."""
        at, (here, twin) = ill.sign_read, map(_or_none, self._read(ill))
        taken = at.measurement in ("dashboard", *self.measured)
        where = _where(ill) + ("" if taken else " (not taken)")
        return f"In {where}, {at.reading}: {here} here, {twin} in the twin."

    def _against(self, name: str) -> str:
        """Why a wrong diagnosis is not the right one."""
        patient, notes = self.patient.patient, notes_by_diagnosis()[name]
        look = f"Look at {_where(patient)}." if patient.sign_read else ""
        if name == "healthy":
            return f"Something is off, and it's more than a seed or rounding. {look}"
        hint = "\nThe ward is the right one." * (patient.ward == notes["ward"])
        ill = next((p for p in numbered() if p.name == name), None)
        sign = f"Its sign would be: {notes['sign']}.\n"
        if ill is None:
            return f"{sign}That isn't what this patient has. {look}".rstrip() + hint
        at, (here, twin) = ill.sign_read, self._read(ill)
        if math.isnan(here):
            why = "There is nothing of that to measure here."
        elif not at.fits(here):
            why = f"With that bug it's {'above' if at.above else 'below'} {at.threshold:g}."
        elif at.fits(twin):
            why = "On this task the healthy twin is there too, so it says nothing."
        else:
            why = "It fits, but something else fits better. What else is out of order?"
        return f"{sign}{self._evidence(ill)} {why}{hint}"


def _says_nothing(readings: Readings | str) -> bool:
    """Whether a measurement had nothing to measure in the patient."""
    if isinstance(readings, str):
        return isinstance(readings, measuring.Nothing)
    parts = [part for v in readings.values() for part in (v if isinstance(v, tuple) else (v,))]
    return all(isinstance(part, float) and math.isnan(part) for part in parts)


def _where(patient: Patient) -> str:
    """Where the sign of a bug is seen."""
    at = patient.sign_read.measurement
    return "the chart" if at == "dashboard" else f'"{at}"'


def _or_none(value: float) -> str:
    return "nothing" if math.isnan(value) else shown(value)


def named(answer: int | str) -> tuple[str | None, str]:
    """The diagnosis that is meant, or None and what is wrong with the answer."""
    known = names()
    if is_whole_number(answer):
        if 1 <= answer <= len(known):
            return known[answer - 1], ""
        return None, f"Diagnoses have the numbers 1 to {len(known)}; {answer} is none of them."
    words = " ".join(answer.lower().split()) if isinstance(answer, str) else ""
    if words.isdecimal():
        return named(int(words))
    lowered = {name.lower(): name for name in known}
    if words in lowered:
        return lowered[words], ""
    near = get_close_matches(words, lowered, n=1, cutoff=0.4)
    meant = f" Did you mean {lowered[near[0]]!r}?" if near else ""
    return None, f"No diagnosis is called {answer!r}.{meant} clinic.diagnoses() lists them."


@cache
def patient(number: int) -> Case:
    """The case with this number, 1 to 28; it is run when somebody looks."""
    if not is_whole_number(number) or number not in range(1, len(numbered()) + 1):
        raise ValueError(f"number: expected 1 to {len(numbered())}, got {number!r}")
    return Case(number, Subject(numbered()[number - 1], number + FIRST_SEED))


def diagnoses(seen: str = "") -> None:
    """Print the symptoms, or the diagnoses of those with this word ("flat"; "all" prints all 40).

    Their numbers are those of the alphabet.
    """
    known, word = notes_by_diagnosis(), " ".join(str(seen).lower().split()).strip(". ")
    wards = groupby(known, lambda name: known[name]["ward"])
    fitting = {w: [*under] for w, under in wards if word == "all" or word in w.lower()}
    if not word:
        for ward, under in fitting.items():
            print(f"{ward:45}{len(under):3}")
        print('clinic.diagnoses("flat") names those of the first, clinic.diagnoses("all") all.')
    elif not fitting:
        print(f"Nothing you might see is called {seen!r}. clinic.diagnoses() lists what is.")
    for ward, under in fitting.items() if word else ():
        print("\n".join([ward, *(f"{names().index(name) + 1:4}  {name}" for name in under)]))


def tally() -> None:
    """Print how many patients you've seen, and how many you got right at the first attempt."""
    print(progress.clinic_line())


def provenance(known: Patient) -> str:
    """Where such a bug was seen, and what the link really shows."""
    if known.seen == "none":
        return "we know of no public thread"
    return f"{known.seen}: {known.shows} ({known.link})"


HEAD = ("symptom", "likely cause", "measure", "sign", "cure")


def table() -> str:
    """Symptom, causes, what to measure, its sign, and cure, as an HTML table."""
    order = [*notes_by_diagnosis()]  # ward by ward
    ill = sorted((p for p in numbered() if p.sign_read), key=lambda p: order.index(p.name))
    rows = ["".join(f"<th>{name}</th>" for name in HEAD)]
    for patient in ill:
        together = [p for p in ill if p.ward == patient.ward]
        symptom = f'<td rowspan="{len(together)}"><b>{html.escape(patient.ward)}</b></td>'
        where = patient.sign_read.measurement.replace("dashboard", "chart")
        sign = f"{patient.sign}; in large runs: {patient.large}" if patient.large else patient.sign
        row = "".join(
            f"<td>{html.escape(cell)}</td>" for cell in (patient.name, where, sign, patient.cure)
        )
        rows.append(symptom * (together[0] is patient) + row)
    return "<table>\n" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</table>"
