"""The runs behind notebooks 06 and 07: what a thought is worth, and how a policy comes to think.

    python tools/experiments/thinking.py                       what is not stored yet (1.5 hours)
    python tools/experiments/thinking.py --again               all of it
    python tools/experiments/thinking.py --only "torn pages"   this family alone

Writes data/results/thinking.json after each run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import store
import torch
from results import SCORES, base_checksum, last_scores
from store import Results, Seed, Store, spread
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

ROWS = SUMMIT.prompts_per_step * SUMMIT.group_size  # completions, or demonstrations, per update
INTERVALS = ("evaluate_every", "eval_every")
HABIT_QUESTIONS, HABIT_SEED = 1200, 1  # held out; to measure what a base model does of itself


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
    """n questions of the trained lengths, answered right after a whole thought or after none."""
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
        "shown right answers, lr 0.0001": Variant(documents="right answers", lr=1e-4),
        "shown right answers, lr 0.001": Variant(documents="right answers", lr=1e-3),
        "shown the warm-up again, lr 0.0001": Variant(documents="the warm-up", lr=1e-4),
        "shown the warm-up again, lr 0.001": Variant(documents="the warm-up", lr=1e-3),
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
    if variant.updates is not None:  # from random weights, with the schedule of the warm-up
        documents = partial(DOCUMENTS[variant.documents], ROWS)
        return ((m.step, m.loss) for m in pretrain(policy, documents, schedule(variant, seed)))
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
    """As in `train_grpo`: a constant learning rate and no weight decay."""
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
    generator, questions = torch.Generator().manual_seed(HABIT_SEED), []
    for length in TRAINED_LENGTHS:
        each = HABIT_QUESTIONS // len(TRAINED_LENGTHS)
        questions += draw_questions(each, generator, lengths=(length,), held_out=True)
    r = ask(policy, questions, seed=HABIT_SEED)
    whole = r.thinking == r.lengths  # one token of thought for each term
    found = {"correct": r.correct, "whole": whole}
    return {name: round(hits.double().mean().item(), 4) for name, hits in found.items()}


def measure(variant: Variant, one: Seed) -> Results:
    """One run: what the base does, and the scores on the way."""
    policy = start(variant, one.seed)
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
    for step, loss in train(variant, policy, one.seed):
        if step % variant.every == 0:
            look(step, loss)
    return {"seed": one.seed, **before, **({"loss": losses} if losses else {}), "curve": curve}


def settings(variant: Variant) -> Results:
    """All that decides how the runs go, in a form that can be compared with a stored one."""
    present = asdict(variant)
    del present["seeds"]
    present["measured with"] = [evaluate.__kwdefaults__, HABIT_QUESTIONS, HABIT_SEED]
    if variant.updates is not None:
        return {**present, "training": without_intervals(schedule(variant, 0))}
    present["training"] = without_intervals(SUMMIT)
    if variant.torn is None:
        return {**present, "base": base_checksum()}
    documents = {**warmup_documents.__kwdefaults__, "torn": variant.torn, "rows": WARMUP_ROWS}
    return {**present, "base": [without_intervals(WARMUP), documents]}


def without_intervals(config: Any) -> Results:
    """The settings, but for those that only say when something is stored or measured."""
    return {k: v for k, v in asdict(config).items() if k not in INTERVALS}


def store_of(family: str, name: str) -> Store:
    """Of one variant."""
    variant = FAMILIES[family][name]
    seeds = [Seed(seed) for seed in variant.seeds]
    return Store("thinking.json", seeds, partial(settings, variant), (family, name))


def runs(family: str, name: str) -> list[Results]:
    """What is stored of one variant."""
    return store_of(family, name).stored()


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
HABITS = {"whole": 3, "correct": 2}  # digits
ENDS = {"accuracy": 2, "harder": 2, "thinking": 1}


def table() -> str:
    """One line per entry of TABLE: the base's whole thoughts, and the scores after the run."""
    rows = [
        "| | seeds | base: whole thoughts | base: sampled | sampled | 7 and 8 digits "
        "| tokens of thought |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, (family, name) in TABLE.items():
        if not (found := runs(family, name)):
            rows.append(f"| {title} | 0 | not run yet | | | | |")
            continue
        cells = [spread([run["base"][k] for run in found], d) for k, d in HABITS.items()]
        cells += [spread([run["curve"][k][-1] for run in found], d) for k, d in ENDS.items()]
        rows.append(f"| {title} | {len(found)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing."""
    options = store.parser(__doc__, FAMILIES).parse_args(arguments)
    setup(seed=0)
    for family in [options.only] if options.only else FAMILIES:
        for name, variant in FAMILIES[family].items():
            store_of(family, name).fill(partial(measure, variant), last_scores, options.again)


if __name__ == "__main__":
    main()
