"""The verdict on a loss, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from minigrpo.clinic.catalogue import MISTAKES, NAMED, NOTES
from minigrpo.clinic.judge import asking
from minigrpo.clinic.judge.asking import REWARD, Answer, Judged, Report, Unjudged, answer, same
from minigrpo.clinic.judge.logits import FromLogits, from_logits
from minigrpo.clinic.judge.probes import DEFAULTS, PROBES, Probe
from minigrpo.clinic.judge.trial import Finding, Trial, course

CAUTIONS = {  # what TRL's own code does too, and no ordinary input shows: how it is seen
    "mask_by_multiplication": "with NaN under the mask, loss or gradient isn't finite",
    "advantages_not_detached": "a gradient reaches advantages that carry a graph",
    "old_log_probs_not_detached": "a gradient reaches old log-probs that carry a graph",
    "equal_rewards_not_exactly_zero": "three rewards of 0.1 have advantages that aren't exactly 0",
    "group_of_one_accepted": "a group of one is answered, and nothing is raised",
}
UNSEEN = """\
What no judge of a loss can see: how the log-probs were scored (the shift by one, the temperature),
what the mask holds, the sampler, the reward, and the optimizer."""


def judge_loss(
    function: Callable | str, names: Mapping[str, str] = MappingProxyType({}), **built_in: Any
) -> Report:
    """Judge a loss, or a function that makes advantages.

    `built_in` are options of `grpo_loss` or `group_advantages` that it has built in. "file.py:name"
    is judged in a process of its own, as `python -m minigrpo.clinic judge` does.
    """
    if isinstance(function, str):
        return asking.judge_file(function, built_in)
    try:
        if not callable(function):
            raise Unjudged(f"expected a function, got {type(function).__name__}")
        given, function = checked(built_in), from_logits(function, names)
        judged = Judged(function, names)
        found = verdict_on(judged, given)
        raises = found.verdict == "not judged" and "it raises" in found.text
        if raises or found.mistakes[:1] == ["advantages_along_the_tokens"]:
            judged = Judged(function, names)
            judged.per_token = True
            again = verdict_on(judged, given)
            found = again if again.passed or again.mistakes and raises else found
        return found
    except Unjudged as error:
        return asking.unjudged(error)


def verdict_on(judged: Judged, built_in: dict[str, Any]) -> Report:
    try:
        trial = Trial(judged, built_in)
        return report(trial, trial.finding())
    except Unjudged as error:
        return asking.unjudged(error)


def checked(built_in: dict[str, Any]) -> dict[str, Any]:
    """What is said to be built in, if it makes sense."""
    for name, value in built_in.items():
        like = DEFAULTS.get(name, 1)
        kinds = {tuple: (tuple,), str: (str,), bool: (bool, int)}.get(type(like), (int, float))
        if name not in {*DEFAULTS, "max_length"}:
            known = ", ".join([*DEFAULTS, "max_length"])
            raise Unjudged(f"expected one of {known} to be set, got {name!r}")
        if not isinstance(value, kinds):
            raise Unjudged(f"{name}: expected something like {like!r}, got {value!r}")
    for kind, probe in (("advantages", PROBES["advantages"][0]), ("loss", PROBES["loss"][0])):
        settings = {k: v for k, v in built_in.items() if (k in REWARD) == (kind == "advantages")}
        if "max_length" not in settings and settings.get("how") == "constant":
            settings["max_length"] = 1
        if isinstance(error := answer(course(), probe, settings), str):
            raise Unjudged(error.partition(": ")[2])
    return built_in


def report(trial: Trial, finding: Finding) -> Report:
    """The verdict in words."""
    right, wrong = trial.answers(), finding.wrong
    trl, stored = trial.trl()
    sick = course(*finding.forms)
    off = [case for case in trl if not trial.agrees(*case[::2], case[1])]
    off = [
        (probe, theirs, got) for probe, theirs, got in off
        if not finding.forms or not same(got, answer(sick, probe, trial.settings(probe)))
    ]  # fmt: skip
    entries, notes, layout = [], [], []
    if isinstance(trial.judged.function, FromLogits):
        entries, notes, layout = trial.judged.function.told()
    for form in finding.forms:
        if form.name in NOTES or form in trial.variants:
            notes.append((form.name, [NOTES.get(form.name, form.sentence)]))
            continue
        answers = trial.answers(form)
        seen = [i for i in wrong if not same(answers[i], right[i])]  # where it alone would be seen
        explained = [i for i in seen if same(answers[i], trial.got[i])]
        at = min(explained or seen or wrong, key=lambda i: trial.probes[i][1].size)
        case = trial.probes[at][1], right[at], trial.got[at]
        entries.append((form.name, [form.sentence, *example(*case)]))
    told = trial.answers(*finding.forms)
    odd = [(trial.probes[i][1], told[i], trial.got[i]) for i in wrong]
    odd = [case for case in odd if not same(*case[1:])]
    unknown = []
    if odd or (not wrong and off):
        count = len(trial.probes) - len(odd) if odd else len(trl) - len(off)
        words = f"It's right in {count} of {len(trial.probes) if odd else len(trl)} cases, and "
        words += "otherwise in some that no name here explains. If that's a variant, it's meant."
        unknown = [words, *example(*min(odd or off, key=lambda case: case[0].size))]
    elif not wrong and trial.kind != "advantages" and trial.reads_padding():
        unknown = ["Loss or gradient depends on what is under the mask."]
    cautions = trial.cautions()
    verdict = "mistake" if entries else "unknown" if unknown else "notes" if notes else "right"
    head = {"right": "Nothing wrong was found.", "unknown": "Not a variant that the judge knows."}
    head |= {"notes": f"Right, with {len(notes)} note{'s' * (len(notes) > 1)}."}
    head |= {"mistake": f"{len(entries)} mistake{'s' * (len(entries) > 1)}"}
    lines = [head[verdict]]
    if trial.judged.unused:
        lines.append(f"Not used, so not judged: {', '.join(trial.judged.unused)}.")
    lines += layout
    entries += [("unknown", unknown)] * bool(unknown)
    for name, words in entries + [(f"note: {name}", words) for name, words in notes]:
        lines += ["", name, *(f"  {line}" for line in words)]
    for name in cautions:
        seen = f"Seen here: {CAUTIONS[name]}. TRL's own code does it too, so it's no mistake."
        lines += ["", f"careful: {name}", f"  {NAMED[name].sentence}", f"  {seen}"]
    lines += ["", *coverage(trial, right, trl, off, stored), UNSEEN]
    mistakes = [name for name, _ in entries if name != "unknown"]
    return Report(verdict, mistakes, [name for name, _ in notes], cautions, "\n".join(lines))


def example(probe: Probe, right: Answer, got: Answer) -> list[str]:
    words = probe.what, asking.shown(right), asking.shown(got)
    return [f"{name:<10}{word}" for name, word in zip(("case", "expected", "got"), words)]


def coverage(trial: Trial, right: list[Answer], trl: list, off: list, stored: int) -> list[str]:
    """What the verdict rests on."""
    single = [form for form in trial.forms if form in MISTAKES]
    plain = [m for m in single if m.name not in CAUTIONS]
    blind = [m.name for m in plain if all(map(same, trial.answers(m), right))]
    lines = ["What this covers"]
    if trl:
        what = "value and gradient" if trial.kind == "loss" else "every advantage"
        lines.append(f"  {len(trl) - len(off)} of {len(trl)} of TRL's answers agree, {what}.")
    if len(trl) < stored:
        less = f"{stored - len(trl)} of TRL's {stored}"
        lines.append(f"  {less} can't be asked: it lacks their settings.")
    if trial.kind == "rewards":
        lines.append("  TRL's stored answers start from advantages, so none was compared.")
    lines.append(f"  {len(single) - len(blind)} of {len(single)} named mistakes would show.")
    if blind:
        told = f"These wouldn't, with the options it has: {', '.join(blind)}."
        lines += wrap(told, 100, initial_indent="  ", subsequent_indent="    ")
    built_in = {k: v for k, v in trial.assumed.items() if k in trial.turned or k == "max_length"}
    if trial.turned:
        words = ", ".join(f"{k}={v!r}" for k, v in built_in.items())
        lines.append(f"  It seems to have built in {words}. If you meant otherwise, use --set.")
    for option, error in trial.uncovered.items():
        lines.append(f"  Not covered: {option}, where it raises {error}.")
    return lines
