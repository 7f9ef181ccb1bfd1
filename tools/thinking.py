"""The runs behind notebooks 06 and 07: what a thought is worth, and how a policy comes to think.

    python tools/thinking.py                       what is not stored yet (one core: 1.5 hours)
    python tools/thinking.py --only "torn pages"   of this family alone
    python tools/thinking.py --summary             what is stored, a line for each variant

Writes data/results/thinking.json after each run.
"""

from __future__ import annotations

import argparse
import copy
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
    warmup_documents,
)
from minigrpo.files import atomic_path
from minigrpo.grpo import rollout, score, train_grpo
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.logprobs import masked_mean
from minigrpo.notebook.setup import setup
from minigrpo.pretrain import Batch, PretrainConfig, documents_batch, next_token_loss, pretrain
from minigrpo.study.experiments import (
    EXPERIMENTS,
    SUMMIT,
    WARMUP,
    WARMUP_ROWS,
    warm_up,
    warmup_batch,
)

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "data" / "results" / "thinking.json"

ROWS = SUMMIT.prompts_per_step * SUMMIT.group_size  # completions, or demonstrations, per update
INTERVALS = ("evaluate_every", "eval_every")
HABIT_QUESTIONS, HABIT_SEED = 1200, 1  # held out; to measure what a base model does of itself

Results = dict[str, Any]


# --------------------------------------------------------------------------------------------
# tasks


@dataclass(frozen=True, kw_only=True)
class NoisyArithmetic(Arithmetic):
    """The task, graded by somebody who is wrong with probability `flip`, each time anew."""

    flip: float
    generator: torch.Generator

    def reward(self, prompts: list[Tensor], completions: list[Tensor]) -> list[float]:
        right = super().reward(prompts, completions)
        wrong = torch.rand(len(right), generator=self.generator) < self.flip
        return [1.0 - r if w else r for r, w in zip(right, wrong.tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class FewQuestions(Arithmetic):
    """The task with so many questions of its training side, the same from the first step on."""

    questions: int
    seed: int

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        fixed_order = torch.Generator().manual_seed(self.seed)
        few = [prompt_ids(question) for question in draw_questions(self.questions, fixed_order)]
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
# the families


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of a figure. As it is, it's the run of notebook 07; each entry changes something."""

    seeds: tuple[int, ...] = (0, 1, 2)
    torn: float | None = None  # a base of its own with this share of torn pages; None = what ships
    torn_seed: int | None = None  # one such base for all seeds; None = one for each
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings of GRPOConfig
    flip: float | None = None  # probability that a reward is wrong
    questions: int | None = None  # so many questions in the whole run
    any_thought: bool = False  # the reward is for a thought of any kind
    rejection: bool = False  # imitate the right ones of the policy's own completions
    documents: str | None = None  # imitate these, of DOCUMENTS
    lr: float = SUMMIT.lr  # of imitation
    updates: int | None = None  # imitate from random weights, with a schedule
    every: int = 10  # steps between two evaluations


def shown(documents: str, lr: float) -> Variant:
    """The shipped base imitates documents instead."""
    return Variant(documents=documents, lr=lr)


def control(documents: str, lr: float, updates: int) -> Variant:
    """An untrained Llama imitates documents."""
    return Variant(documents=documents, lr=lr, updates=updates, every=updates // 20)


DOCUMENTS: dict[str, Callable[[int, torch.Generator], Batch]] = {
    "right answers": partial(solved, thinking=True),
    "right answers, no thought": partial(solved, thinking=False),
    "the warm-up": warmup_batch,
}
HARDEST = 0  # the seed of the base without torn pages that thinks to the end least often

FAMILIES: dict[str, dict[str, Variant]] = {
    "a thought or none": {
        "after a thought, lr 0.001": control("right answers", 1e-3, 400),
        "after a thought, lr 0.005": control("right answers", 5e-3, 400),
        "without a thought, lr 0.001": control("right answers, no thought", 1e-3, 2000),
        "without a thought, lr 0.005": control("right answers, no thought", 5e-3, 2000),
    },
    "torn pages": {
        "0.1": Variant(torn=0.1, seeds=(0, 1, 2, 3, 4)),
        "0.03": Variant(torn=0.03, seeds=(0, 1, 2, 3, 4)),
        "0": Variant(torn=0.0, seeds=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)),
    },
    "the hardest base, twice as long": {
        "0": Variant(
            torn=0.0, torn_seed=HARDEST, seeds=(0, 1, 2, 3, 4), changes={"steps": 200}, every=20
        ),
    },
    "equal terms": {
        "rewarded, lr 0.001": Variant(changes={"lr": 1e-3}),
        "shown right answers, lr 0.0001": shown("right answers", 1e-4),
        "shown right answers, lr 0.001": shown("right answers", 1e-3),
        "shown the warm-up again, lr 0.0001": shown("the warm-up", 1e-4),
        "shown the warm-up again, lr 0.001": shown("the warm-up", 1e-3),
        "rejection sampling": Variant(rejection=True),
    },
    "paid for any thought": {
        "KL weight 0.01": Variant(any_thought=True),
        "KL weight 0": Variant(any_thought=True, changes={"kl_weight": 0.0}),
    },
    "flipped rewards": {f"{p:g}": Variant(flip=p) for p in (0.1, 0.2, 0.3, 0.4, 0.45, 0.5)},
    "few questions": {str(n): Variant(questions=n) for n in (1, 4, 16)},
    "group size": {
        f"{ROWS // g} x {g}": Variant(changes={"prompts_per_step": ROWS // g, "group_size": g})
        for g in (2, 4, 16, 32)
    },
}
"""By family and name. The run as it is, with five seeds, is in results.json."""


# --------------------------------------------------------------------------------------------
# ways to train: each yields (step, loss or None) and changes the policy in place

Steps = Iterator[tuple[int, float | None]]


def train(variant: Variant, policy: nn.Module, seed: int) -> Steps:
    """As the variant says."""
    if variant.updates is not None:
        return by_schedule(policy, seed, variant)
    if variant.documents is not None:
        return by_imitation(policy, seed, DOCUMENTS[variant.documents], variant.lr)
    if variant.rejection:
        return by_rejection(policy, seed)
    config = replace(SUMMIT, seed=seed, **variant.changes)
    return ((m.step, None) for m in train_grpo(policy, task_of(variant, seed), config))


def task_of(variant: Variant, seed: int) -> Arithmetic:
    """The questions and the reward."""
    if variant.flip is not None:
        return NoisyArithmetic(flip=variant.flip, generator=torch.Generator().manual_seed(seed))
    if variant.questions is not None:
        return FewQuestions(questions=variant.questions, seed=seed)
    if variant.any_thought:
        return Arithmetic(**EXPERIMENTS["reward for any thought"].task)
    return Arithmetic()


def optimizer_of(policy: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW as in `train_grpo`: a constant learning rate and no weight decay."""
    return torch.optim.AdamW(policy.parameters(), lr, SUMMIT.betas, weight_decay=0.0)


def descend(policy: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One update, with the gradient cut down as in `train_grpo`."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), SUMMIT.max_grad_norm)
    optimizer.step()


def by_imitation(policy: nn.Module, seed: int, documents: Callable[..., Batch], lr: float) -> Steps:
    """Cross-entropy on as many new rows per step as the run has, with as many updates on them."""
    generator = torch.Generator().manual_seed(seed + 1)  # 0 is that of the shipped base's warm-up
    optimizer = optimizer_of(policy, lr)
    for step in range(1, SUMMIT.steps + 1):
        ids, mask = documents(ROWS, generator)
        for _ in range(SUMMIT.inner_epochs):
            loss = next_token_loss(policy(ids).logits, ids, mask)
            descend(policy, optimizer, loss)
        yield step, loss.item()


def by_rejection(policy: nn.Module, seed: int) -> Steps:
    """Online rejection sampling: imitate the right ones of the policy's own completions.

    As many questions, completions and updates per step as the run has; no clip, baseline or KL.
    DeepSeekMath (arXiv 2402.03300) calls it online RFT; it often means one round of samples.
    """
    order, sampling = (torch.Generator().manual_seed(seed) for _ in range(2))
    optimizer, task = optimizer_of(policy, SUMMIT.lr), Arithmetic()
    for step in range(1, SUMMIT.steps + 1):
        prompts = task.prompts(SUMMIT.prompts_per_step, order)
        rollouts, rewards = rollout(policy, task, prompts, SUMMIT, sampling)
        right = rollouts.completion_mask & (rewards == 1)[:, None]  # (N, T)
        for _ in range(SUMMIT.inner_epochs if right.any() else 0):
            descend(policy, optimizer, -masked_mean(score(policy, rollouts, SUMMIT)[0], right))
        yield step, None


def by_schedule(policy: nn.Module, seed: int, variant: Variant) -> Steps:
    """Cross-entropy from random weights, with the schedule of the shipped base's warm-up."""
    documents = partial(DOCUMENTS[variant.documents], ROWS)
    for m in pretrain(policy, documents, schedule(variant, seed)):
        yield m.step, m.loss


def schedule(variant: Variant, seed: int) -> PretrainConfig:
    """The warm-up's settings, with other updates, learning rate and documents."""
    return replace(WARMUP, steps=variant.updates, lr=variant.lr, seed=seed + 1)


# --------------------------------------------------------------------------------------------
# a run, and what is kept of it


def start(variant: Variant, seed: int) -> nn.Module:
    """The policy before the run."""
    if variant.updates is not None:
        return tiny_llama(seed)
    if variant.torn is None:
        return load_policy()
    base_seed = seed if variant.torn_seed is None else variant.torn_seed
    return copy.deepcopy(own_base(variant.torn, base_seed))


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
        "whole": round(whole.double().mean().item(), 4),  # with one token of thought for each term
        "correct_if_whole": None if rate is None else round(rate, 4),
        "goes_on": [round(b / a, 4) if a else None for a, b in zip(reached, reached[1:])],
    }


def measured(variant: Variant, seed: int) -> Results:
    """One run: what the base does, and the scores on the way."""
    policy = start(variant, seed)
    before = {} if variant.updates else {"base": habits(policy)}
    curve: dict[str, list[float]] = {name: [] for name in (*SCORES, "step")}
    losses: list[float] = []

    def look(step: int, loss: float | None = None) -> None:
        scores = evaluate(copy.deepcopy(policy).eval())
        curve["step"].append(step)
        for name in SCORES:
            curve[name].append(round(scores[name], 4))
        if loss is not None:
            losses.append(round(loss, 4))

    look(0)
    for step, loss in train(variant, policy, seed):
        if step % variant.every == 0:
            look(step, loss)
    after = {"after": habits(policy.eval())}
    return {"seed": seed, **before, **after, **({"loss": losses} if losses else {}), "curve": curve}


def settings(variant: Variant) -> Results:
    """All that decides how the runs go, in a form that can be compared with a stored one."""
    present = asdict(variant)
    del present["seeds"]
    present["measured with"] = [evaluate.__kwdefaults__, HABIT_QUESTIONS, HABIT_SEED]
    if variant.updates is not None:
        present["training"] = without_intervals(schedule(variant, 0))
        return json.loads(json.dumps(present))
    present["training"] = without_intervals(SUMMIT)
    if variant.torn is None:
        present["base"] = base_checksum()
    else:
        documents = {**warmup_documents.__kwdefaults__, "torn": variant.torn, "rows": WARMUP_ROWS}
        present["base"] = [without_intervals(WARMUP), documents]
    return json.loads(json.dumps(present))


def without_intervals(config: Any) -> Results:
    """The settings, but for those that only say when something is stored or measured."""
    return {k: v for k, v in asdict(config).items() if k not in INTERVALS}


def stored() -> Results:
    """What was found with the present settings: {family: {variant: {settings, runs}}}."""
    results = json.loads(PATH.read_text("utf-8")) if PATH.is_file() else {}
    current: Results = {}
    for family, variants in FAMILIES.items():
        for name, variant in variants.items():
            old = results.get(family, {}).get(name, {})
            same = old.get("settings") == settings(variant)
            runs = [run for run in old.get("runs", ()) if same and run["seed"] in variant.seeds]
            current.setdefault(family, {})[name] = {"settings": settings(variant), "runs": runs}
    return current


def add(family: str, name: str, run: Results) -> None:
    """Store a run beside what is in the file by now."""
    results = stored()
    runs = results[family][name]["runs"]
    others = [other for other in runs if other["seed"] != run["seed"]]
    runs[:] = sorted([*others, run], key=lambda entry: entry["seed"])
    save(results)


def save(results: Results) -> None:
    """Written in one piece, one line per run."""
    families = []
    for family, variants in results.items():
        rows = []
        for name, variant in variants.items():
            runs = ",\n".join(f"   {json.dumps(run)}" for run in variant["runs"])
            described = json.dumps(variant["settings"])
            rows.append(f'  {json.dumps(name)}: {{"settings": {described}, "runs": [\n{runs}]}}')
        families.append(f" {json.dumps(family)}: {{\n" + ",\n".join(rows) + "}")
    with atomic_path(PATH) as unfinished:
        unfinished.write_text("{\n" + ",\n".join(families) + "}\n", "utf-8")


# --------------------------------------------------------------------------------------------
# what docs/results.md shows

TABLE = {
    "torn pages: 10% of the adding documents, as shipped": ("torn pages", "0.1"),
    "torn pages: 3%": ("torn pages", "0.03"),
    "torn pages: none": ("torn pages", "0"),
    "torn pages: none, the tenth base, 200 steps": ("the hardest base, twice as long", "0"),
    "shown correct answers instead, learning rate 1e-4": (
        "equal terms",
        "shown right answers, lr 0.0001",
    ),
    "shown correct answers instead, learning rate 1e-3": (
        "equal terms",
        "shown right answers, lr 0.001",
    ),
    "rewarded, learning rate 1e-3": ("equal terms", "rewarded, lr 0.001"),
    "shown its own correct answers (online rejection sampling)": (
        "equal terms",
        "rejection sampling",
    ),
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
        if not runs:
            lines.append(f"| {title} | 0 | not run yet | | | | |")
            continue
        cells = [spread([run["base"]["whole"] for run in runs], 3)]
        cells.append(spread([run["base"]["correct"] for run in runs], 2))
        for label, digits in (("accuracy", 2), ("harder", 2), ("thinking", 1)):
            cells.append(spread([run["curve"][label][-1] for run in runs], digits))
        lines.append(f"| {title} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def line(name: str, runs: list[Results]) -> str:
    """The mean over the seeds at the end, and the lowest and highest of them."""
    cells = []
    for label in SCORES:
        ends = [run["curve"][label][-1] for run in runs]
        cells.append(f"{label} {fmean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})")
    whole = [run["base"]["whole"] for run in runs if "base" in run]
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
                if all(done["seed"] != seed for done in stored()[family][name]["runs"]):
                    run = measured(variant, seed)
                    add(family, name, run)
                    print(line(f"{name}, seed {seed}", [run]), flush=True)
            runs = stored()[family][name]["runs"]
            if options.summary and runs:
                print(line(name, runs))


if __name__ == "__main__":
    main()
