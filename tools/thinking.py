"""The runs behind notebooks 06 and 07: what a thought is worth, and how a policy comes to think.

    python tools/thinking.py                       what is not stored yet (one core: 1.5 hours)
    python tools/thinking.py --only "torn pages"   of one family, or of several side by side
    python tools/thinking.py --summary             what is stored, a line for each variant

Writes data/results/thinking.json after each run.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("MINIGRPO_THREADS", "1")  # two are no faster for so small a model

import torch
from results import SCORES, base_checksum
from torch import Tensor, nn

from minigrpo.arithmetic import (
    PAD,
    TRAINED_LENGTHS,
    Arithmetic,
    ask,
    completion_ids,
    draw_questions,
    evaluate,
    prompt_ids,
    running_totals,
    warmup_batch,
)
from minigrpo.grpo import rollout, score, train_grpo
from minigrpo.llama import WARMUP, load_policy, tiny_llama, warm_up
from minigrpo.logprobs import masked_mean
from minigrpo.notebook.setup import setup
from minigrpo.pretrain import Batch, PretrainConfig, documents_batch, pretrain
from minigrpo.study.experiments import EXPERIMENTS, SUMMIT

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "data" / "results" / "thinking.json"

ROWS = SUMMIT.prompts_per_step * SUMMIT.group_size  # completions, or demonstrations, per update
HABIT_QUESTIONS, HABIT_SEED = 1200, 1  # held out; to measure what a base model does of itself

Results = dict[str, Any]


# --------------------------------------------------------------------------------------------
# tasks


@dataclass(frozen=True)
class NoisyArithmetic(Arithmetic):
    """The task, graded by somebody who is wrong with probability `flip`, each time anew."""

    flip: float = 0.0
    generator: torch.Generator = field(default_factory=torch.Generator)

    def reward(self, prompts: list[Tensor], completions: list[Tensor]) -> list[float]:
        right = super().reward(prompts, completions)
        wrong = torch.rand(len(right), generator=self.generator) < self.flip
        return [1.0 - r if w else r for r, w in zip(right, wrong.tolist(), strict=True)]


@dataclass(frozen=True)
class FewQuestions(Arithmetic):
    """The task with so many questions of its training side, the same from the first step on."""

    questions: int = 1
    seed: int = 0

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        own = torch.Generator().manual_seed(self.seed)
        few = [prompt_ids(question) for question in draw_questions(self.questions, own)]
        return [few[i] for i in torch.randint(len(few), (n,), generator=generator).tolist()]


# --------------------------------------------------------------------------------------------
# documents to imitate


def solved(n: int, generator: torch.Generator, *, thinking: bool) -> Batch:
    """n questions of the trained lengths, answered right after a whole thought or after none.

    Given is the prompt, opening tag included, to be learned all that follows.
    """
    documents = []
    for question in draw_questions(n, generator):
        totals = running_totals(question)
        completion = completion_ids(totals if thinking else [], totals[-1])
        documents.append((prompt_ids(question).tolist(), completion))
    return documents_batch(documents, PAD)


# --------------------------------------------------------------------------------------------
# ways to train: each yields (step, loss or None) and changes the policy in place


Training = Callable[[nn.Module, int], Iterator[tuple[int, float | None]]]


def by_grpo(
    policy: nn.Module,
    seed: int,
    *,
    task: Callable[[int], Arithmetic] = lambda seed: Arithmetic(),
    **changes: object,
) -> Iterator[tuple[int, float | None]]:
    """The run of notebook 07, with these settings changed."""
    for m in train_grpo(policy, task(seed), replace(SUMMIT, seed=seed, **changes)):
        yield m.step, None


def by_imitation(
    policy: nn.Module,
    seed: int,
    *,
    documents: Callable[[int, torch.Generator], Batch],
    lr: float,
    updates: int = SUMMIT.steps * SUMMIT.inner_epochs,
    warmup: int = 0,
    per_step: int = SUMMIT.inner_epochs,
) -> Iterator[tuple[int, float | None]]:
    """Cross-entropy on as many rows per update as a batch of the run has."""
    config = PretrainConfig(updates, lr, None, weight_decay=0.01, warmup=warmup, seed=seed + 1)
    for m in pretrain(policy, partial(documents, ROWS), config):
        if m.step % per_step == 0:
            yield m.step // per_step, m.loss


def by_rejection(policy: nn.Module, seed: int) -> Iterator[tuple[int, float | None]]:
    """Rejection sampling: of the run's own completions, imitate the right ones, drop the others.

    Same questions, samples, updates, learning rate and gradient norm; no clip, baseline or KL.
    """
    order, sampling = (torch.Generator().manual_seed(seed) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), SUMMIT.lr, SUMMIT.betas, weight_decay=0.0)
    for step in range(1, SUMMIT.steps + 1):
        prompts = Arithmetic().prompts(SUMMIT.prompts_per_step, order)
        rollouts, rewards = rollout(policy, Arithmetic(), prompts, SUMMIT, sampling)
        kept = rollouts.completion_mask & (rewards == 1)[:, None]  # (N, T)
        for _ in range(SUMMIT.inner_epochs if kept.any() else 0):
            loss = -masked_mean(score(policy, rollouts, SUMMIT)[0], kept)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), SUMMIT.max_grad_norm)
            optimizer.step()
        yield step, None


# --------------------------------------------------------------------------------------------
# the families


@dataclass(frozen=True)
class Variant:
    """One line of a figure: a start, a way to train, and the seeds it is run with."""

    train: Training
    settings: Mapping[str, Any]  # what is stored of them, to see when they change
    seeds: tuple[int, ...] = (0, 1, 2)
    torn: float | None = None  # a base of its own with this share of torn pages; None = what ships
    torn_seed: int | None = None  # one such base for all seeds; None = one for each
    untrained: bool = False  # start from random weights instead
    every: int = 10  # steps between two evaluations


def _rewarded(task: Callable[[int], Arithmetic] | None = None, **changes: object) -> Training:
    return partial(by_grpo, **({} if task is None else {"task": task}), **changes)


def grpo_variant(seeds=(0, 1, 2), task=None, note=None, **changes: Any) -> Variant:
    """The run with some settings changed, and perhaps another task, which the note describes."""
    return Variant(_rewarded(task, **changes), {"grpo": changes, "task": note}, seeds)


def imitation_variant(documents, note: Results, **settings: Any) -> Variant:
    """Cross-entropy on documents, which the note describes."""
    train = partial(by_imitation, documents=documents, **settings)
    return Variant(train, {"imitation": settings, "documents": note})


def control(thinking: bool, lr: float, updates: int) -> Variant:
    """An untrained Llama, shown right answers after a whole thought or after none."""
    settings = {"lr": lr, "updates": updates, "warmup": WARMUP.warmup, "per_step": 1}
    one = imitation_variant(partial(solved, thinking=thinking), {"thinking": thinking}, **settings)
    return replace(one, untrained=True, every=updates // 20)


def torn_variant(torn: float, seeds: tuple[int, ...]) -> Variant:
    """Warm-up with this share of torn pages, then the run, both with the same seed."""
    return replace(grpo_variant(seeds), torn=torn)


def flipped(p: float) -> Variant:
    """The run, with a grader who is wrong with probability p."""

    def task(seed: int) -> Arithmetic:
        return NoisyArithmetic(flip=p, generator=torch.Generator().manual_seed(seed))

    return grpo_variant(task=task, note={"flip": p})


def few(n: int) -> Variant:
    """The run on n questions, others for each seed."""

    def task(seed: int) -> Arithmetic:
        return FewQuestions(questions=n, seed=seed)

    return grpo_variant(task=task, note={"questions": n})


def any_thought(kl_weight: float) -> Variant:
    """The run, paid for a thought of any kind."""
    score = EXPERIMENTS["reward for any thought"].task["score"]
    note = {"score": "any_thought"}
    return grpo_variant(task=lambda seed: Arithmetic(score=score), note=note, kl_weight=kl_weight)


HARDEST = 0  # the seed of the base without torn pages that thinks to the end least often

FAMILIES: dict[str, dict[str, Variant]] = {
    "a thought or none": {
        "after a thought, lr 0.001": control(True, 1e-3, 400),
        "after a thought, lr 0.005": control(True, 5e-3, 400),
        "without a thought, lr 0.001": control(False, 1e-3, 2000),
        "without a thought, lr 0.005": control(False, 5e-3, 2000),
    },
    "torn pages": {
        "0.1": torn_variant(0.1, (0, 1, 2, 3, 4)),
        "0.03": torn_variant(0.03, (0, 1, 2, 3, 4)),
        "0": torn_variant(0.0, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)),
    },
    "the hardest base, twice as long": {
        "0": replace(
            grpo_variant((0, 1, 2, 3, 4), steps=200), torn=0.0, torn_seed=HARDEST, every=20
        ),
    },
    "equal terms": {
        "rewarded, lr 0.001": grpo_variant(lr=1e-3),
        **{
            f"{name}, lr {lr:g}": imitation_variant(documents, note, lr=lr)
            for name, documents, note in (
                ("shown right answers", partial(solved, thinking=True), {"thinking": True}),
                ("shown the warm-up again", warmup_batch, {"warm-up": {}}),
            )
            for lr in (1e-4, 1e-3)
        },
        "rejection sampling": Variant(by_rejection, {"rejection": {}}),
    },
    "paid for any thought": {
        "KL weight 0.01": any_thought(0.01),
        "KL weight 0": any_thought(0.0),
    },
    "flipped rewards": {f"{p:g}": flipped(p) for p in (0.1, 0.2, 0.3, 0.4, 0.45, 0.5)},
    "few questions": {"1": few(1), "4": few(4), "16": few(16)},
    "group size": {
        f"{ROWS // g} x {g}": grpo_variant(prompts_per_step=ROWS // g, group_size=g)
        for g in (2, 4, 16, 32)
    },
}
"""By family and name. Where the run itself belongs to a family, its seeds are in results.json."""


# --------------------------------------------------------------------------------------------
# a run, and what is kept of it


def start(variant: Variant, seed: int) -> nn.Module:
    """The policy before the run."""
    if variant.untrained:
        return tiny_llama(seed)
    if variant.torn is None:
        return load_policy()
    own = seed if variant.torn_seed is None else variant.torn_seed
    return copy.deepcopy(own_base(variant.torn, own))


@lru_cache(maxsize=1)
def own_base(torn: float, seed: int) -> nn.Module:
    """A base model after a warm-up with this share of torn pages."""
    policy = tiny_llama(seed)
    for _ in warm_up(policy, replace(WARMUP, seed=seed), torn=torn):
        pass
    return policy.eval()


def habits(policy: nn.Module) -> Results:
    """What a policy does of itself on held-out questions of the trained lengths."""
    generator, n = torch.Generator().manual_seed(HABIT_SEED), HABIT_QUESTIONS // 4
    questions = []
    for length in TRAINED_LENGTHS:
        questions += draw_questions(n, generator, lengths=(length,), held_out=True)
    r = ask(policy, questions, seed=HABIT_SEED)
    whole = r.thinking == r.lengths
    reached = [(r.thinking >= k).sum().item() for k in range(TRAINED_LENGTHS[0] + 1)]
    rate = r.correct[whole].double().mean().item() if whole.any() else None
    return {
        "correct": round(r.correct.double().mean().item(), 4),
        "whole": round(whole.double().mean().item(), 4),  # thoughts with one total for each term
        "correct_if_whole": None if rate is None else round(rate, 4),
        "goes_on": [round(b / a, 4) if a else None for a, b in zip(reached, reached[1:])],
    }


def measured(variant: Variant, seed: int) -> Results:
    """One run: what the base does, and the scores on the way."""
    policy = start(variant, seed)
    before = {} if variant.untrained else {"base": habits(policy)}
    curve: dict[str, list[float]] = {name: [] for name in (*SCORES, "step")}
    losses: list[float] = []

    def look(step: int, loss: float | None = None) -> None:
        found = evaluate(copy.deepcopy(policy).eval())
        curve["step"].append(step)
        for name in SCORES:
            curve[name].append(round(found[name], 4))
        if loss is not None:
            losses.append(round(loss, 4))

    look(0)
    for step, loss in variant.train(policy, seed):
        if step % variant.every == 0:
            look(step, loss)
    after = {"after": habits(policy.eval())}
    return {"seed": seed, **before, **after, **({"loss": losses} if losses else {}), "curve": curve}


def settings(variant: Variant) -> Results:
    """All that decides how the runs go, in a form that can be compared with a stored one."""
    own = {
        k: v for k, v in asdict(replace(variant, train=None)).items() if k not in ("train", "seeds")
    }
    shared = {"run": asdict(SUMMIT), "warm-up": asdict(WARMUP), "base": base_checksum()}
    return json.loads(json.dumps(own | shared))


def stored() -> Results:
    """What was found with the present settings: {family: {variant: {settings, runs}}}."""
    results = json.loads(PATH.read_text("utf-8")) if PATH.is_file() else {}
    kept: Results = {}
    for family, variants in FAMILIES.items():
        for name, variant in variants.items():
            old = results.get(family, {}).get(name, {})
            same = old.get("settings") == settings(variant)
            runs = [one for one in old.get("runs", ()) if same and one["seed"] in variant.seeds]
            kept.setdefault(family, {})[name] = {"settings": settings(variant), "runs": runs}
    return kept


def add(family: str, name: str, run: Results) -> None:
    """Store a run; what another process has stored meanwhile stays."""
    lock = os.open(PATH.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        results = stored()
        runs = results[family][name]["runs"]
        runs[:] = sorted(
            [one for one in runs if one["seed"] != run["seed"]] + [run], key=lambda one: one["seed"]
        )
        save(results)
    finally:
        os.close(lock)


def save(results: Results) -> None:
    """Written in one piece, one line per run."""
    families = []
    for family, variants in results.items():
        rows = []
        for name, found in variants.items():
            runs = ",\n".join(f"   {json.dumps(one)}" for one in found["runs"])
            own = json.dumps(found["settings"])
            rows.append(f'  {json.dumps(name)}: {{"settings": {own}, "runs": [\n{runs}]}}')
        families.append(f" {json.dumps(family)}: {{\n" + ",\n".join(rows) + "}")
    part = PATH.with_name(PATH.name + ".part")
    part.write_text("{\n" + ",\n".join(families) + "}\n", "utf-8")
    part.replace(PATH)


# --------------------------------------------------------------------------------------------
# what README.md shows

TABLE = {
    "torn pages: 10% of the adding documents, as shipped": ("torn pages", "0.1"),
    "torn pages: 3%": ("torn pages", "0.03"),
    "torn pages: none": ("torn pages", "0"),
    "none, the slowest base, 200 steps": ("the hardest base, twice as long", "0"),
    "shown right answers instead, learning rate 1e-4": (
        "equal terms",
        "shown right answers, lr 0.0001",
    ),
    "shown right answers instead, learning rate 1e-3": (
        "equal terms",
        "shown right answers, lr 0.001",
    ),
    "rewarded, learning rate 1e-3": ("equal terms", "rewarded, lr 0.001"),
    "shown its own right answers (rejection sampling)": ("equal terms", "rejection sampling"),
    "three rewards in ten flipped": ("flipped rewards", "0.3"),
    "half of the rewards flipped": ("flipped rewards", "0.5"),
    "one single question": ("few questions", "1"),
}


def spread(values: list[float], digits: int) -> str:
    """The mean, and in brackets the lowest and highest, unless they look alike."""
    mean, low, high = (f"{v:.{digits}f}" for v in (fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def table() -> str:
    """One line per entry of TABLE: the base's whole thoughts, and the scores after the run."""
    lines = [
        "| | seeds | base: whole thoughts | base: sampled | sampled | 7 and 8 digits "
        "| tokens of thought |",
        "|---|---|---|---|---|---|---|",
    ]
    results = stored()
    for title, (family, name) in TABLE.items():
        runs = results[family][name]["runs"]
        cells = [spread([one["base"]["whole"] for one in runs], 3)]
        cells.append(spread([one["base"]["correct"] for one in runs], 2))
        for label, digits in (("accuracy", 2), ("harder", 2), ("thinking", 1)):
            cells.append(spread([one["curve"][label][-1] for one in runs], digits))
        lines.append(f"| {title} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def line(name: str, runs: list[Results]) -> str:
    """The mean over the seeds at the end, and the lowest and highest of them."""
    cells = []
    for label in SCORES:
        ends = [one["curve"][label][-1] for one in runs]
        cells.append(f"{label} {fmean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})")
    whole = [one["base"]["whole"] for one in runs if "base" in one]
    base = f"  base whole {fmean(whole):.4f}" if whole else ""
    return f"{name:34} {len(runs)} seeds  " + "  ".join(cells) + base


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*FAMILIES], action="append", help="this family alone")
    parser.add_argument("--summary", action="store_true", help="what is stored")
    options = parser.parse_args(arguments)
    setup(seed=0)
    for family in options.only or FAMILIES:
        if options.summary:
            print(f"\n{family}")
        for name, variant in FAMILIES[family].items():
            for seed in () if options.summary else variant.seeds:
                if all(one["seed"] != seed for one in stored()[family][name]["runs"]):
                    run = measured(variant, seed)
                    add(family, name, run)
                    print(line(f"{name}, seed {seed}", [run]), flush=True)
            runs = stored()[family][name]["runs"]
            if options.summary and runs:
                print(line(name, runs))


if __name__ == "__main__":
    main()
