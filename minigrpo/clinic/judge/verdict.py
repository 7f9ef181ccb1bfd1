"""The verdict on a loss, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from minigrpo.clinic.catalogue import MISTAKES, NAMED, NOTES
from minigrpo.clinic.judge import asking
from minigrpo.clinic.judge.asking import REWARD, Answer, Judged, answer, same
from minigrpo.clinic.judge.logits import FromLogits, from_logits
from minigrpo.clinic.judge.micro_batches import NAME, SAYS, MicroBatches
from minigrpo.clinic.judge.probes import DEFAULTS, PROBES, Probe
from minigrpo.clinic.judge.report import Report, Unjudged, judge_file, unjudged
from minigrpo.clinic.judge.trial import ON_POLICY, Finding, Trial, course
from minigrpo.objective import VARIANTS

CAUTIONS = {  # what TRL's own code does too, and no ordinary input shows: and how it's seen
    "mask_by_multiplication": "with NaN under the mask, loss or gradient isn't finite",
    "advantages_not_detached": "a gradient reaches advantages that carry a graph",
    "old_log_probs_not_detached": "a gradient reaches old log-probs that carry a graph",
    "equal_rewards_not_exactly_zero": "three rewards of 0.1 have advantages that aren't exactly 0",
    "group_of_one_accepted": "a group of one is answered, and nothing is raised",
}
NOT_READ = (
    "It divides by the tokens at hand, so micro-batches with unequally many don't add up to their "
    "batch, although it could know the whole batch's count, and doesn't read"
)
PER_TOKEN = (
    "Judged with an advantage per token, (N, T). With one per row, (N,), they would run along the "
    "tokens wherever N = T."
)
SCORING = "how the log-probs were scored (the shift by one, the temperature), "
UNSEEN = (
    f"What no judge of a loss can see: {SCORING}what the mask holds, the sampler, the reward, and "
    "the optimizer."
)
HEADS = {
    "right": "Nothing wrong was found.",
    "notes": "Right, with notes: {}.",
    "unknown": "Unknown: not a variant that the judge knows.",
    "mistake": "Mistake: {}.",
}


def judge_loss(
    function: Callable | str,
    names: Mapping[str, str] = MappingProxyType({}),
    like: str | None = None,
    **built_in: Any,
) -> Report:
    """Judge a loss, or a function that makes advantages.

    `names` says what its parameters are, theirs to ours, where their names don't; `like` is one of
    `minigrpo.objective.VARIANTS` that it has to be; `built_in` are options of `grpo_loss` or
    `group_advantages` that it has built in. "file.py:name" is judged in a process of its own, as
    `grpo-judge` does.
    """
    if isinstance(function, str):
        return judge_file(function, built_in, names=names, like=like)
    try:
        if not callable(function):
            raise Unjudged(f"expected a function, got {type(function).__name__}")
        if isinstance(function, type):
            name = function.__name__
            words = f"{name} is a class: name an instance, or for a trainer of TRL's --from trl"
            raise Unjudged(f"{words} file.py:{name}")
        given, (function, names) = checked(built_in), from_logits(function, names)
        judged = Judged(function, names)
        trial = Trial(judged, {**asked_for(like, judged), **given})
        return report(trial, trial.finding())
    except Unjudged as error:
        return unjudged(error)


def assert_grpo_loss(function: Callable | str, **given: Any) -> None:
    """AssertionError with the report unless the loss is right; `given` as for `judge_loss`.

    A loss that the judge doesn't know fails too, or a mistake without a name would pass. For a
    variant of your own, `assert not judge_loss(loss).mistakes` asks for less.
    """
    __tracebackhide__ = True  # pytest then shows the line that called it
    report = judge_loss(function, **given)
    if not report.passed:
        raise AssertionError(report.text)


def asked_for(like: str | None, judged: Judged) -> dict[str, Any]:
    """What an algorithm has built in, but for numbers, and what the function leaves open."""
    if like is not None and like not in VARIANTS:
        raise Unjudged(f"expected one of {', '.join(VARIANTS)}, got {like!r}")
    wanted = {"level": "token", "surrogate": "clip", "baseline": "mean", **VARIANTS[like or "grpo"]}
    kinds = {"loss": (False,), "advantages": (True,)}.get(judged.kind, (False, True))
    return {
        k: v for k, v in wanted.items()
        if like and k != "clip" and (k in REWARD) in kinds and k not in judged.options
    }  # fmt: skip


def checked(built_in: dict[str, Any]) -> dict[str, Any]:
    """What is said to be built in, if it makes sense."""
    known = [*DEFAULTS, "max_length"]
    for name, value in built_in.items():
        like = DEFAULTS.get(name, 1)
        kinds = {tuple: (tuple,), str: (str,), bool: (bool, int)}.get(type(like), (int, float))
        if name not in known:
            raise Unjudged(f"expected one of {', '.join(known)} to be set, got {name!r}")
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
    """The verdict in words, short and long, and as a dictionary."""
    right, wrong = trial.answers(), finding.wrong
    logits = trial.judged.function
    mistakes, notes = logits.told() if isinstance(logits, FromLogits) else ({}, {})
    if trial.judged.per_token is True:
        notes["advantages_per_token"] = {"sentence": PER_TOKEN}
    for form in trial.named([f for f in finding.forms if f.name not in CAUTIONS] or finding.forms):
        if not trial.mistakes([form]):
            notes[form.name] = {"sentence": NOTES.get(form.name, form.sentence)}
            continue
        answers = trial.answers(form)
        seen = [i for i in wrong if not same(answers[i], right[i])]  # where it alone would be seen
        explained = [i for i in seen if same(answers[i], trial.got[i])]
        at = min(explained or seen or wrong, key=lambda i: trial.probes[i].size)
        case = example(trial.probes[at], right[at], trial.got[at])
        mistakes[form.name] = {"sentence": form.sentence, **case}

    odd, (trl, stored) = trial.open(*finding.forms).values(), trial.trl()
    off_still = off = [case for case in trl if not trial.agrees(*case)]
    if finding.forms:
        sick = course(*finding.forms)
        off_still = [c for c in off if not same(c[2], answer(sick, c[0], trial.settings(c[0])))]
    unknown = {}
    if odd or (not wrong and off_still):
        of = len(trial.probes) if odd else len(trl)
        told_of = "explained by what is said above" if finding.forms else "right"
        words = f"{of - len(odd or off_still)} of {of} answers are {told_of}, the others aren't. "
        words += "Perhaps it's a variant, and that's what it's meant to do. The smallest such case:"
        case = example(*min(odd or off_still, key=lambda case: case[0].size))
        unknown = {"sentence": words, **case}
    elif not wrong and trial.kind != "advantages" and trial.reads_padding():
        unknown = {"sentence": "Loss or gradient depends on what is under the mask."}

    parts = MicroBatches(trial)
    if parts.odd and not mistakes:
        mistakes[NAME] = {"sentence": SAYS, **example(*parts.odd)}
    if parts.ignored:
        notes["whole_batch_not_counted"] = {"sentence": f"{NOT_READ} {', '.join(parts.ignored)}."}
    verdict = "mistake" if mistakes else "unknown" if unknown else "notes" if notes else "right"
    cautions = trial.cautions()
    details = {
        "verdict": verdict, "mistakes": mistakes, "unknown": unknown, "notes": notes,
        "cautions": cautions, "not_used": trial.judged.unused, "read_as": trial.judged.roles,
        "built_in": built_in(trial, finding), "not_covered": trial.uncovered,
        "micro_batches": "" if mistakes else parts.words,
        "cases": len(trial.probes), "off": len(wrong), "explained": finding.explained,
        "not_shown": blind(trial, right),
        "trl": {"agree": len(trl) - len(off), "explained": len(off) - len(off_still),
                "asked": len(trl), "stored": stored, "obstacles": trial.obstacles},
    }  # fmt: skip
    if isinstance(logits, FromLogits):
        details |= logits.details(trial.judged.roles)
    texts = in_words(details), in_words(details, long=True)
    return Report(verdict, [*mistakes], [*notes], cautions, *texts, details)


def example(probe: Probe, right: Answer, got: Answer) -> dict[str, str]:
    """A case in words; of a large one, only where the answers differ."""
    where, (expected, given) = "", map(asking.shown, (right, got))
    if len(expected + given) > 160 and not isinstance(right, str) and not isinstance(got, str):
        pairs = [(r - g).abs().nan_to_num(float("inf")) for r, g in zip(right, got)]
        part = max(range(len(pairs)), key=lambda i: pairs[i].max())
        at = int(pairs[part].argmax())
        index = [at // pairs[part].shape[-1], at % pairs[part].shape[-1]] if part else []
        where = f", the gradient at row, column {index}" if part else ", the value"
        expected, given = (f"{x[part].flatten()[at]:.5g}" for x in (right, got))
    return {"case": probe.what + where, "expected": expected, "got": given}


def built_in(trial: Trial, finding: Finding) -> dict[str, Any]:
    """What it seems to have built in, as far as it shows."""
    hidden = ["eps"] * (trial.assumed.get("scale") == "none")
    hidden += ["clip", "surrogate"] * (ON_POLICY in finding.forms)
    known = {*trial.turned, "max_length"} - {*hidden}
    return {k: v for k, v in trial.assumed.items() if k in known}


def blind(trial: Trial, right: dict[int, Answer]) -> list[str]:
    """The named mistakes that wouldn't show."""
    plain = [m for m in trial.forms if m in MISTAKES and m.name not in CAUTIONS]
    names = [m.name for m in plain if all(same(trial.says(i, m), r) for i, r in right.items())]
    return [*dict.fromkeys(names)]


def in_words(details: dict[str, Any], long: bool = False) -> str:
    """One screen, or with everything that a maintainer might ask."""
    names = ", ".join(details["mistakes"] or details["notes"])
    unseen = UNSEEN.replace(SCORING, "") if "given" in details else UNSEEN
    lines = [HEADS[details["verdict"]].format(names)]
    if unused := ", ".join(details["not_used"]):
        lines.append(f"Not used, so not judged: {unused}.")
    lines += [details["given"]] if "given" in details else []
    entries = [*details["mistakes"].items(), *details["notes"].items()]
    entries += [("unknown", details["unknown"])] * bool(details["unknown"])
    for name, entry in entries:
        head = f"{name} (a note)" if name in details["notes"] else name
        lines += ["", *[head] * (name != "unknown"), *paragraph(entry["sentence"])]
        lines += [f"  {k:<10}{entry[k]}" for k in ("case", "expected", "got") if k in entry]
    lines += [""]
    trl = details["trl"]
    if trl["asked"]:
        words = f"{trl['agree']} of {trl['asked']} of TRL's answers agree"
        more = f"; {trl['explained']} others do but for what is said above"
        lines.append(words + more * bool(trl["explained"]) + ".")
    elif trl["stored"]:
        lines.append(f"None of TRL's answers could be asked: {trl['obstacles']}.")
    if details["built_in"]:
        words = ", ".join(f"{k}={v!r}" for k, v in details["built_in"].items())
        lines += paragraph(f"Built in, as it seems: {words}. If you meant otherwise: --set.", "")
    if details["micro_batches"]:
        lines += paragraph(details["micro_batches"], "")
    if details["cautions"]:
        lines += paragraph(f"True of TRL's own code, too: {', '.join(details['cautions'])}.", "")
    if not long:
        return "\n".join([*lines, "What this covers, and what not: --notes."])
    for name in details["cautions"]:
        seen = f"Seen here: {CAUTIONS[name]}. TRL's own code does it too, so it's no mistake."
        lines += ["", f"careful: {name}", *paragraph(NAMED[name].sentence), *paragraph(seen)]
    lines += ["", "What this covers"]
    lines += [f"  {theirs} is {ours}." for theirs, ours in details["read_as"].items()]
    if 0 < trl["asked"] < trl["stored"]:
        less = f"{trl['stored'] - trl['asked']} of TRL's {trl['stored']} answers"
        lines.append(f"  {less} can't be asked: it lacks their settings.")
    if not trl["stored"]:
        lines.append("  TRL's stored answers start from advantages, so none was compared.")
    if details["not_shown"]:
        names = ", ".join(details["not_shown"])
        lines += paragraph(f"With the options it has, these mistakes wouldn't show: {names}.")
    for option, error in details["not_covered"].items():
        lines.append(f"  Not covered: {option}, where it raises {error}.")
    return "\n".join([*lines, *paragraph(unseen)])


def paragraph(words: str, indent: str = "  ") -> list[str]:
    return wrap(words, 98, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
