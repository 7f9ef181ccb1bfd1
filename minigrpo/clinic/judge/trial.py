"""Is this loss right? Anyone's loss, against TRL's stored answers and the named mistakes.

Every mistake in `FORMS` and `VARIANTS` is put in a copy of the course's objective. A loss is asked
small cases (`probes`); where it is wrong, the copies that answer the same name the mistake.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigrpo import objective
from minigrpo.clinic import catalogue
from minigrpo.clinic.catalogue import FORMS, NAMED, NO_CLIP, NOTES, Mistake
from minigrpo.clinic.judge import asking
from minigrpo.clinic.judge.asking import NEEDS, REWARD, Answer, Judged, answer, same
from minigrpo.clinic.judge.probes import BUILT_IN, DEFAULTS, OPTIONAL, PROBES, SIZES, Probe, rows
from minigrpo.clinic.judge.report import SEARCH, Unjudged
from minigrpo.clinic.judge.trl_answers import SCALES, VARIANTS, Answers, translated
from minigrpo.clinic.mistakes import sick_sources, source_of

KL = (  # what is made of log-probs and how far they are above the others, in forms with a name
    lambda new, d: math.expm1(-d) + d,
    lambda new, d: math.expm1(d) - d,
    lambda new, d: d * d / 2,
    lambda new, d: d,
    lambda new, d: -math.exp(new - d) * d,
    lambda new, d: math.exp(new) * d,
    lambda new, d: d - new,  # the gradient of F.kl_div without log_target
)
WIDTH = NAMED["mean_over_the_padding"]
UNMASKED = next(form for form in FORMS if form.name == WIDTH.name and form.lines != WIDTH.lines)
(TOKEN_SUM,) = (form for form in catalogue.VARIANTS if form.name == "token_sum")
ON_POLICY = NAMED["ratio_against_itself_though_there_are_old_log_probs"]
OBJECTIVE = inspect.getsource(objective)
ADVANTAGES = (objective.group_advantages, objective.equal_groups)  # where those about them are


@cache
def course(*mistakes: Mistake) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    """The course's objective with these mistakes, as a function of inputs and settings.

    ValueError: two of them are in one place.
    """
    source = OBJECTIVE
    for function, sick in sick_sources(sum((m.lines for m in mistakes), ())).items():
        source = source.replace(source_of(function), sick)
    names: dict[str, Any] = {"__name__": "minigrpo.objective with mistakes"}
    exec(compile(source, "<objective with mistakes>", "exec"), names)
    names["_ratio_metrics"] = lambda *_: {}  # which takes half of the time

    def call(inputs: dict[str, Any], settings: dict[str, Any]) -> Any:
        inputs, settings = dict(inputs), dict(settings)
        options = {k: settings.pop(k) for k in REWARD if k in settings}
        if "rewards" in inputs:
            arguments = inputs.pop("rewards"), inputs.pop("group_size")
            inputs["advantages"] = names["group_advantages"](*arguments, **options)
        return names["grpo_loss"](**inputs, **settings) if len(inputs) > 1 else inputs["advantages"]

    return call


@cache
def says(
    mistakes: tuple[Mistake, ...], kind: str, number: int, *settings: tuple[str, Any]
) -> Answer:
    """What the course's objective with these mistakes says of a probe."""
    return answer(course(*mistakes), PROBES[kind][number], dict(settings))


class Finding(NamedTuple):
    """Which mistakes explain the wrong answers, if these settings are built in."""

    forms: list[Mistake]
    wrong: list[int]  # numbers in Trial.probes
    explained: int  # how many of them
    assumed: dict[str, Any]


class Trial:
    """One function: what it answers to every probe, and what that says of it."""

    def __init__(self, judged: Judged, built_in: dict[str, Any]) -> None:
        self.judged, self.kind, self.built_in = judged, judged.kind, built_in
        self.assumed, self.uncovered, self.turned = dict(built_in), {}, []
        self.obstacles, self.ends = "", time.process_time() + SEARCH
        self.about = {True: self.kind != "loss", False: self.kind != "advantages"}
        known = catalogue.VARIANTS + FORMS
        self.forms = [form for form in known if self.about[form.lines[0][0] in ADVANTAGES]]
        self.variants, self.facts = [*catalogue.VARIANTS], []
        self.measured: dict[str, list] = {}
        self.probes: dict[int, Probe] = {}  # those asked, by their numbers in PROBES
        self.got: dict[int, Answer] = {}
        self.choose_form()
        self.drop_what_is_not_read()
        self.ask()
        if self.kind != "advantages" and not self.reads_the_mask():
            no = "mask_in_the_denominator_only"  # nor is it there
            self.forms = [form for form in self.forms if form.name != no]
        self.measure()
        self.fit()

    @property
    def free(self) -> set[str]:
        """The options whose value is ours to choose."""
        return self.judged.options - self.built_in.keys()

    def settings(self, probe: Probe) -> dict[str, Any]:
        """Those of a probe, as far as the function has them, and what is known of the others."""
        wanted = {**DEFAULTS, **probe.settings}
        if "how" not in self.free:
            wanted = {"max_length": 5, **wanted}  # it may be the constant that is divided by
        return {**{k: v for k, v in wanted.items() if k in self.judged.options}, **self.assumed}

    def reply(self, probe: Probe, **inputs: Any) -> Answer:
        """What the function answers, perhaps with other inputs."""
        probe = probe._replace(inputs={**probe.inputs, **inputs})
        return answer(self.judged, probe, self.settings(probe))

    def choose_form(self) -> None:
        """The first dtype of the mask, and set of options, with which nothing is raised."""
        probe, judged, known = PROBES[self.kind][0], self.judged, self.judged.options
        shapes = (False, "needed") if self.kind == "loss" else (False,)
        ways = [*product(shapes, asking.FLOATS, (known, judged.named), asking.MASKS)]
        for judged.per_token, judged.dtype, judged.options, judged.mask in [*ways, ways[0]]:
            if not isinstance(self.reply(probe), str):
                break
        if self.kind == "loss" and not judged.per_token and not self.by_rows():
            judged.per_token = True
            judged.per_token = self.by_rows()

    def by_rows(self) -> bool:
        """Whether an advantage reaches the tokens of its row, and those alone."""
        reply = self.reply(rows([[1, 1], [1, 1]], [1, -1]))
        if isinstance(reply, str):
            return False
        (a, b), (c, d) = reply[1].tolist()
        return abs(a - b) + abs(c - d) < 1e-6 * (abs(a) + abs(c)) < abs(a - c)

    def drop_what_is_not_read(self) -> None:
        """An option that changes no answer isn't one."""
        for option in sorted(self.judged.options - {*OPTIONAL, "max_length"}):
            probes = [p for p in PROBES[self.kind] if option in p.settings or option == "clip"]
            other = (0.05, 0.05) if option == "clip" else DEFAULTS[option]
            if probes and not any(self.depends(p, option, other) for p in probes):
                self.judged.options.discard(option)
                theirs = self.judged.roles.items()
                self.judged.unused += [p for p, to in theirs if to.partition(" ")[0] == option]
        if "clip" in self.judged.options:
            far = [p for p in PROBES[self.kind] if p.settings.get("clip") == (0.2, 0.28)]
            self.judged.one_clip |= not any(self.depends(p, "clip", (0.2, 0.2)) for p in far)

    def depends(self, probe: Probe, option: str, other: Any) -> bool:
        """Whether the answer is another one with this value of an option."""
        settings = self.settings(probe)
        pair = (answer(self.judged, probe, s) for s in (settings, {**settings, option: other}))
        return not same(*pair)

    def two_bounds(self, settings: dict[str, Any]) -> bool:
        """Whether the clip has two, and the function one."""
        return self.judged.one_clip and len({*settings.get("clip", (0,))}) > 1

    def ask(self) -> None:
        asked_for = set()
        for number, probe in enumerate(PROBES[self.kind]):
            settings = self.settings(probe)
            if (key := repr([probe.inputs, settings])) in asked_for or self.two_bounds(settings):
                continue  # without the option that it lacks, it's a case that there was
            asked_for.add(key)
            reply = self.reply(probe)
            asked = [f"{k}={v!r}" for k, v in probe.settings.items() if k in self.free]
            probe = probe._replace(what=", ".join([probe.what, *asked]))
            if probe.inputs.get("old_log_probs", 0) is None:
                asked = ["old_log_probs=None"]
            if isinstance(reply, str) and asked:
                self.uncovered.setdefault(asked[0], reply)
            else:
                self.probes[number], self.got[number] = probe, reply
        errors = [reply for reply in self.got.values() if isinstance(reply, str)]
        if len(errors) == len(self.got):
            raise Unjudged(f"it raises {errors[0] if errors else 'an error in every case'}")
        if not self.judged.connected:
            raise Unjudged("the loss has no gradient, nothing connects it with log_probs")
        for number in [*self.got][:4]:
            before, again = self.got[number], self.reply(self.probes[number])
            if not same(again, before):
                two = f"{asking.shown(before)} and {asking.shown(again)}"
                why = "it is random or keeps something between calls"
                raise Unjudged(f"two calls with the same inputs differ ({two}), so {why}")

    def says(self, number: int, *mistakes: Mistake) -> Answer:
        """What the course's objective with these mistakes says of a probe."""
        settings = self.settings(self.probes[number]).items()
        return says(mistakes, self.kind, number, *settings)

    def answers(self, *mistakes: Mistake) -> dict[int, Answer]:
        """What it says of every probe."""
        return {number: self.says(number, *mistakes) for number in self.probes}

    def hits(self, wrong: list[int], *mistakes: Mistake, least: int = 0) -> int:
        """To how many of these probes it says what the function does; below `least`, any number."""
        hits = 0
        for left, number in zip(range(len(wrong), 0, -1), wrong):
            if hits + left < least:
                break
            hits += same(self.got[number], self.says(number, *mistakes))
        return hits

    # ----- what is built in

    def token(self, ratio: float, advantage: float, **more: Any) -> list[float]:
        """Loss and gradient of a single token; NaN where it can't be asked."""
        probe = rows([[ratio]], [advantage], **more)
        reply = self.reply(probe)
        return [x.sum().item() for x in reply] if not isinstance(reply, str) else 3 * [float("nan")]

    def measure(self) -> None:
        """Numbers that it has built in, from cases so far off that they show."""
        if self.kind != "loss":
            self.measured["eps"] = self.measured_eps()
            return
        if not (unit := (self.token(1, -1)[1] - self.token(1, 1)[1]) / 2):
            return
        far_off = (50, 1), (0.02, -1), (50, -1), (0.02, 1)
        up, down, over, under = (self.end(*case) / abs(unit) for case in far_off)
        if over < 1 < under:  # the ratio is upside down
            over, under = under, over
        # a clip has no end over 1 and under 1 on the other sides, so that may be the mistake
        high = up - 1 if up == up else over - 1 if under == under else math.inf
        low = 1 - down if down == down else 1 - under if under == under else 1.0
        low = DEFAULTS["clip"][0] if low == 1.0 and over == up else low  # CISPO's is not used
        clip = float(f"{low:.5g}"), float(f"{high:.5g}")
        finite = math.isfinite(self.token(1, 1)[0])
        if finite and 0 <= low < math.inf and high >= 0 and any(clip):
            self.measured["clip"] = [clip]
        if over == up >= 2 and down != down:
            self.variants.append(catalogue.cut_off(float(f"{up:.5g}")))
        if over > 1 and over > up + 1e-6:
            self.variants.append(catalogue.dual_clip(float(f"{over:.5g}")))
        weights = [1.0]
        if "kl_weight" not in self.judged.options:
            weights = self.measured["kl_weight"] = self.measured_kl_weights(unit)
        for weight in weights[:1]:
            named = {"kl_weight": 1.0} if "kl_weight" in self.judged.options else {}
            kl = [self.token(1, 0, kl=far, **named)[0] / unit / weight for far in (1e-5, 1e-6)]
            if abs(kl[0] - kl[1]) < 1e-9 * abs(kl[0]) and kl[0] > 0:
                self.facts.append(catalogue.k3_up_to(float(f"{kl[0]:.5g}")))
        self.variants += self.facts
        self.forms = [*self.variants[len(catalogue.VARIANTS) :], *self.forms]

    def end(self, ratio: float, advantage: float) -> float:
        """The size of the surrogate that a ratio ends at on its way there; NaN if it doesn't."""
        near, far = (self.token(r, advantage)[0] - self.token(r, 0)[0] for r in (ratio, ratio**1.5))
        return abs(near) if abs(near - far) < 1e-6 * abs(near) else math.nan

    def measured_kl_weights(self, unit: float) -> list[float]:
        """What a KL term is multiplied by, if it is one of those that there are names for."""
        weights, points = [], ((-1.0, math.log(2)), (-2.0, -math.log(2)))
        for old, ref in ((0, 1), (1, 0)):  # or against the old policy
            asked = [self.token(math.exp(old * d), 0, kl=math.exp(ref * d), new=new)
                     for new, d in points]  # fmt: skip
            sizes = [(value if value == value else slope) / unit for value, slope, _ in asked]
            for kl in KL:
                first, second = (size / kl(*at) for size, at in zip(sizes, points))
                if abs(first - second) < 1e-4 * abs(first) and abs(first) > 1e-9:
                    weights.append(float(f"{abs(first):.4g}"))
        return weights

    def measured_eps(self) -> list[float]:
        """What is added to the std, whatever that is, of rewards 1 and 0."""
        replies = [self.reply(probe) for probe in SIZES[self.kind]]
        found = [0.0 if isinstance(r, str) else abs(r[-1].flatten()[0].item()) for r in replies]
        if not all(found):
            return []
        if self.kind == "rewards":  # where the gradient of the first token is half an advantage
            found = [2 * x for x in found]
        small, large = 5e-4 / found[0], 0.5 / found[1]  # size times the std, plus eps
        eps = small - 1e-3 * (large - small) / (1 - 1e-3)
        return [float(f"{eps:.3g}")] if 5e-10 < eps < 1 and large > 1.01 * small else []

    def values_of(self, option: str) -> tuple:
        return tuple(self.measured.get(option) or BUILT_IN[option])

    def assume(self, **more: Any) -> None:
        """Take it that this is built in; a constant is found out."""
        self.assumed.update(more)
        known = {*self.judged.options, *self.built_in}
        if "how" in known and self.assumed.get("how") != "constant" or "max_length" in known:
            return
        self.assumed.pop("max_length", None)
        if self.assumed.get("how") == "constant":  # the gradients are smaller by it than with 1
            self.assumed["max_length"] = 1
            right = self.answers(*self.facts)
            sizes = [
                (right[number][1].abs().sum() / got[1].abs().sum()).item()
                for number, got in self.got.items()
                if not isinstance(got, str) and got[1].abs().sum() > 0
            ]
            integers = [round(s) for s in sizes if 0.5 < s < 1e9 and abs(s - round(s)) < 1e-3]
            self.assumed["max_length"] = max(integers, key=integers.count, default=1)

    def agreement(self, **more: Any) -> int:
        """To how many probes the right code says the same. A wrong sign or NaN hides no more."""
        before = dict(self.assumed)
        self.assume(**more)
        count = 0
        for number, right in self.answers(*self.facts).items():
            probe, got = self.probes[number], self.got[number]
            if not isinstance(got, str) and got[0].isnan().all() and not isinstance(right, str):
                right = [got[0], *right[1:]]
            flipped = got if isinstance(got, str) else [-x for x in got]
            count += self.agrees(probe, right, got) or self.agrees(probe, right, flipped)
        self.assumed = before
        return count

    def fit(self) -> None:
        """Find out what is built in, one option after the other, twice."""
        known = self.judged.options | self.built_in.keys()
        wanted = [k for k in BUILT_IN if self.about[k in REWARD] and k not in known]
        self.turned = [k for k in wanted if k not in NEEDS or NEEDS[k] in self.judged.options]
        self.assume(**{option: self.values_of(option)[0] for option in self.turned})
        if "scale" in self.turned:
            stds = [], [NAMED["population_std"]]
            scales = product(stds, BUILT_IN["scale"], self.values_of("eps"))
            self.of_advantages(*max(scales, key=lambda values: self.of_advantages(*values)))
        if {"how", "level"} <= {*self.turned}:  # one after the other they mislead each other
            pairs = [{"level": level, "how": how}
                     for level, how in product(BUILT_IN["level"], BUILT_IN["how"])]  # fmt: skip
            self.assume(**max(pairs, key=lambda pair: self.agreement(**pair)))
        for option in self.turned * 2:
            value = max(self.values_of(option), key=lambda value: self.agreement(**{option: value}))
            self.assume(**{option: value})
        self.assume()

    def of_advantages(self, facts: list[Mistake], scale: str, eps: float) -> int:
        """Take it that advantages are made so; to how many probes the right code says the same."""
        self.facts = facts
        self.assume(scale=scale, **({"eps": eps} if "eps" in self.turned else {}))
        return self.agreement()

    # ----- which mistakes

    def agrees(self, probe: Probe, right: Answer, got: Answer) -> bool:
        """The same answer. With one ratio per row, a row without a token may be a constant."""
        if same(got, right) or isinstance(got, str) or isinstance(right, str):
            return same(got, right)
        level = self.settings(probe).get("level", "token")
        empty = self.kind != "advantages" and 0 in probe.inputs["completion_mask"].sum(1)
        return level != "token" and empty and same(got[1:], right[1:])

    def explain(self, most: int = 4) -> Finding:
        """The mistakes with which the right code answers the same, as few as possible."""
        right, wrong, named = self.answers(), [*self.open()], [*self.facts]
        explained = self.hits(wrong, *named)
        while explained < len(wrong) and len(named) < most and not self.late():
            best: tuple[int, float, Mistake | None] = explained + 1, -math.inf, None
            names = [form.name for form in named]
            for form in (form for form in self.forms if form.name not in names):
                try:
                    hits = self.hits(wrong, *named, form, least=best[0])
                except ValueError:  # in one place with another
                    continue
                if hits < best[0]:
                    continue
                told = self.answers(*named, form)
                spoilt = sum(not same(told[i], r) for i, r in right.items() if i not in wrong)
                if hits >= spoilt and (hits, -spoilt) > best[:2]:
                    best = hits, -spoilt, form
            if best[2] is None:
                break
            explained = best[0]
            named.append(best[2])
        if self.kind != "loss" and self.facts:  # a note that the others make needless
            fewer = [form for form in named if form not in self.facts]
            if self.hits(wrong, *fewer) >= explained:
                named = fewer
        explained = len(wrong) - len(self.open(*named))
        return Finding(named, wrong, explained, dict(self.assumed))

    def open(self, *forms: Mistake) -> dict[int, tuple[Probe, Answer, Answer]]:
        """The probes that the right code with these mistakes answers otherwise, and the answers."""
        cases = {i: (self.probes[i], t, self.got[i]) for i, t in self.answers(*forms).items()}
        return {i: case for i, case in cases.items() if not self.agrees(*case)}

    def late(self) -> bool:
        return time.process_time() > self.ends + asking.CLOCK.seconds()

    def mistakes(self, forms: list[Mistake]) -> list[Mistake]:
        """Without what is right under a condition."""
        asked = {"std_over_the_batch"} if "scale" in self.built_in else set()
        notes = NOTES.keys() - asked
        return [form for form in forms if form.name not in notes and form not in self.variants]

    def finding(self) -> Finding:
        """`explain` with what was found out; if something stays open, with other settings too."""
        findings, fitted = [first := self.explain()], dict(self.assumed)
        varied = ("how", "surrogate") if self.kind == "loss" else ("scale", "eps", "baseline")
        varied = [option for option in varied if option in self.turned]
        usual = {option: self.values_of(option)[0] for option in self.turned}
        values = product(*(BUILT_IN[option] for option in varied))
        for others, value in product((fitted, usual), values):
            complete = findings[-1].explained == len(findings[-1].wrong)
            few = len(self.mistakes(findings[-1].forms)) < 2 or "surrogate" not in varied
            if complete and few or self.late():
                break
            self.assume(**{**others, **dict(zip(varied, value))})
            other_surrogate = self.assumed.get("surrogate") != first.assumed.get("surrogate")
            enough = len(first.forms) if first.explained == len(first.wrong) else 4
            findings.append(self.explain(1 if other_surrogate else enough))
        best = max(findings, key=lambda f: (
            f.explained - len(f.wrong), -len(self.mistakes(f.forms)), -len(f.forms)
        ))  # fmt: skip
        self.assumed = best.assumed
        forms = best.forms if 2 * best.explained >= len(best.wrong) else []
        if best.explained < len(best.wrong):
            forms = [f for f in forms if f not in self.mistakes([f]) or self.holds(f, best)]
        return best._replace(forms=[*forms, *self.no_clip()])

    def holds(self, form: Mistake, finding: Finding) -> bool:
        """Whether a mistake explains what it would change, though other cases stay open."""
        vain = "kl_against_the_old_policy", "first_update_without_a_gradient"
        if form.name in vain and ON_POLICY in finding.forms:
            return False  # together they are no KL, or no gradient at all
        right, still = self.answers(), self.open(*finding.forms)
        seen = [i for i, alone in self.answers(form).items() if not same(right[i], alone)]
        odd = [i for i in seen if i in still]
        return 2 * len(odd) <= len(seen) and all(self.probes[i].size > 1 for i in odd)

    def named(self, forms: list[Mistake]) -> list[Mistake]:
        """As they are told: one for two together, or by another name where the options say so."""
        padded = {"mask_in_the_denominator_only", "dr_grpo_divides_by_the_width"}
        if padded <= {form.name for form in forms}:  # a mean over all columns, with their values
            forms = [UNMASKED, *(form for form in forms if form.name not in padded)]
        # the same sum, if it's no mean
        names = {WIDTH: "dr_grpo_divides_by_the_width"} if "how" in self.turned else {}
        names |= {TOKEN_SUM: "sum_over_the_rows"} if "max_length" in self.judged.options else {}
        return [NAMED.get(names.get(form, ""), form) for form in forms]

    def no_clip(self) -> list[Mistake]:
        """What is to be noted of a clip that isn't there."""
        clip = self.assumed.get("clip")
        if [clip] != self.measured.get("clip") or self.assumed.get("surrogate") == "cispo":
            return []
        bounds = clip[0] == 1.0, clip[1] == math.inf
        return [NO_CLIP[bounds]] if bounds in NO_CLIP else []

    # ----- cautions

    def padded(self) -> Probe:
        """The first probe with a token under the mask."""
        return next(p for p in self.probes.values() if not p.inputs["completion_mask"].all())

    def under_the_mask(self, garbage: float) -> Answer:
        """What it answers with garbage where the mask is 0."""
        inputs = (probe := self.padded()).inputs
        padding, names = inputs["completion_mask"] == 0, ("log_probs", "old_log_probs", *OPTIONAL)
        dirty = {k: inputs[k].masked_fill(padding, garbage * i) for i, k in enumerate(names, 1)}
        return self.reply(probe, **dirty)

    def reads_the_mask(self) -> bool:
        """Whether it answers otherwise if every token counts."""
        probe = self.padded()
        full = torch.ones_like(probe.inputs["completion_mask"])
        return not same(self.reply(probe), self.reply(probe, completion_mask=full))

    def leaks(self, name: str) -> bool:
        """Whether a gradient reaches this input."""
        probe = next(iter(self.probes.values()))
        graph = probe.inputs[name].clone().requires_grad_()
        log_probs = probe.inputs["log_probs"].clone().requires_grad_()
        inputs = {**probe.inputs, "log_probs": log_probs, name: graph}
        try:
            with asking.quietly():
                value = asking.first(self.judged(inputs, self.settings(probe)))
                (gradient,) = torch.autograd.grad(value.sum(), [graph], allow_unused=True)
        except (Exception, SystemExit):  # nothing was connected, or it refuses such an input
            return False
        return gradient is not None and bool((gradient != 0).any())

    def cautions(self) -> list[str]:
        names = []
        if self.kind != "advantages":
            clean, nan = self.under_the_mask(0.0), self.under_the_mask(float("nan"))
            finite = not isinstance(nan, str) and all(x.isfinite().all() for x in nan)
            if not isinstance(clean, str) and not finite and not self.reads_padding():
                names.append("mask_by_multiplication")
            paid = "advantages" if self.kind == "loss" else "rewards"
            names += ["advantages_not_detached"] * self.leaks(paid)
            names += ["old_log_probs_not_detached"] * self.leaks("old_log_probs")
        if self.kind != "loss":
            probe = next(iter(self.probes.values()))
            tensors = {k: v for k, v in probe.inputs.items() if isinstance(v, Tensor)}
            three = {k: v[:1].repeat_interleave(3, dim=0) for k, v in tensors.items()}
            three |= {"rewards": torch.full((3,), 0.1, dtype=torch.float64), "group_size": 3}
            equal = self.reply(probe, **three)
            trace = 0.0 if isinstance(equal, str) else equal[0].abs().max()
            names += ["equal_rewards_not_exactly_zero"] * bool(0 < trace < 1e-3)
            alone = self.reply(probe, group_size=1)
            names += ["group_of_one_accepted"] * (not isinstance(alone, str))
        return names

    def reads_padding(self) -> bool:
        """Whether numbers under the mask change the answer."""
        return not same(self.under_the_mask(-0.3), self.under_the_mask(0.0))

    # ----- TRL

    def trl(self) -> tuple[list[tuple[Probe, Answer, Answer]], int]:
        """TRL's answers that the function can be asked for, each beside its own; of how many."""
        stored, cases = Answers(), []
        if self.kind == "advantages":
            for scale in SCALES:
                for (r, size), theirs in zip(stored.reward_cases, stored.advantages(scale)):
                    words = f"rewards {r.tolist()} in groups of {size}"
                    inputs, options = {"rewards": r, "group_size": size}, {"scale": scale}
                    options |= {"baseline": "mean"} | ({} if scale == "none" else {"eps": 1e-4})
                    cases.append((Probe(words, inputs, options), [theirs]))
        for variant, words in VARIANTS.items() if self.kind == "loss" else ():
            options = {k: v for k, v in translated(**words).items() if v is not None}
            if options["kl_weight"]:
                options["estimator"] = "k3"
            else:
                del options["kl_correction"]
            for case, (loss, slope, of_entropy, _) in zip(stored.cases, stored.losses(variant)):
                inputs = case._asdict()
                inputs["completion_mask"] = inputs.pop("mask")
                of_entropy = torch.zeros_like(slope) if of_entropy is None else of_entropy
                words = f"a batch of {tuple(slope.shape)} of TRL's {variant}"
                cases.append((Probe(words, inputs, options), [loss, slope, of_entropy]))
        known = {**DEFAULTS, **self.assumed}
        lacks = [
            [k for k, v in p.settings.items() if k not in self.free and known.get(k) != v]
            + ["clip"] * self.two_bounds(p.settings)
            for p, _ in cases
        ]
        few = min(lacks, key=len, default=[])
        near = [p.settings for (p, _), less in zip(cases, lacks) if less == few]
        theirs = {k: {repr(settings[k]) for settings in near if k in settings} for k in few}
        self.obstacles = "; ".join(
            f"yours has {k}={known.get(k)!r}, theirs {' or '.join(sorted(theirs[k]))}" for k in few
        )
        asked = [case for case, less in zip(cases, lacks) if not less and self.covers(case[0])]
        numbers = [x for got in self.got.values() if not isinstance(got, str) for x in got]
        single = all(x.equal(x.float().double()) for x in numbers)
        if single and self.kind == "advantages":  # whose rounding the eps magnifies
            asked = [(p, t) for p, t in asked if not nearly_alike(**p.inputs)]
        return [(p, t, self.reply(p)) for p, t in asked], len(cases)

    def covers(self, probe: Probe) -> bool:
        """Whether nothing is raised by an option of this case."""
        first = probe.inputs.get("old_log_probs", 0) is None and "old_log_probs=None"
        return not {first, *(f"{k}={v!r}" for k, v in probe.settings.items())} & {*self.uncovered}


def nearly_alike(rewards: Tensor, group_size: int) -> bool:
    """Whether some group's rewards are, and not quite."""
    std = rewards.view(-1, group_size).std(dim=1)
    return bool(((std > 0) & (std < 0.01 * (1 + rewards.abs().max()))).any())
