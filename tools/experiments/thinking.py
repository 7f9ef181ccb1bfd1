"""The runs behind notebooks 06 and 07: what a thought is worth, and how a policy comes to think.

    python tools/experiments/thinking.py --only "torn pages"  # without --only 1.5 hours

Writes data/results/thinking.json after each run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any

import results
import store
import torch
from results import base_checksum, scores
from store import Results, Seed, Store, at_the_end, spread
from torch import Tensor, nn

from minigrpo import arithmetic
from minigrpo.arithmetic import TRAINED_LENGTHS, Arithmetic, ask, draw_questions, prompt_ids
from minigrpo.grpo import GRPOConfig, rollout, train_grpo
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.pretrain import Batch, PretrainConfig, documents_batch, next_token_loss, pretrain
from minigrpo.study.experiments import SUMMIT, WARMUP, WARMUP_ROWS, any_thought, warm_up

ROWS = SUMMIT.prompts_per_step * SUMMIT.group_size  # completions, or demonstrations, per update
HABIT_QUESTIONS, HABIT_SEED = 1200, 1  # held out; to measure what a base model does of itself


@dataclass(frozen=True, kw_only=True)
class Task(Arithmetic):
    """The task, perhaps with few questions, or graded by somebody who is often wrong."""

    generator: torch.Generator  # of the grader
    flip: float = 0.0  # the probability that a reward is wrong, each time anew
    questions: int | None = None  # so many of the training side, the same from the first step on

    def reward(self, prompts: list[Tensor], completions: list[Tensor]) -> list[float]:
        right = super().reward(prompts, completions)
        wrong = torch.rand(len(right), generator=self.generator) < self.flip
        return [1.0 - r if w else r for r, w in zip(right, wrong.tolist(), strict=True)]

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        if self.questions is None:
            return super().prompts(n, generator)
        fixed_order = torch.Generator().manual_seed(self.generator.initial_seed())
        few = [prompt_ids(question) for question in draw_questions(self.questions, fixed_order)]
        return [few[i] for i in torch.randint(len(few), (n,), generator=generator).tolist()]


def solved(n: int, generator: torch.Generator, *, thinking: bool) -> Batch:
    """n questions of the trained lengths, answered right after a whole thought or after none."""
    documents = []
    for question in draw_questions(n, generator):
        totals = arithmetic.running_totals(question)
        completion = arithmetic.completion_ids(totals if thinking else [], totals[-1])
        documents.append((prompt_ids(question).tolist(), completion))
    return documents_batch(documents, arithmetic.PAD)


DOCUMENTS = {
    "right answers": partial(solved, ROWS, thinking=True),
    "right answers, no thought": partial(solved, ROWS, thinking=False),
}
OWN = "its own right answers"  # online rejection sampling


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of a figure. As it is, it's the run of notebook 07; each entry changes something."""

    seeds: range = range(3)
    torn: float | None = None  # a base of its own with this share of torn pages; None = what ships
    torn_seed: int | None = None  # one such base for all seeds; None = one for each
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings of GRPOConfig
    task: Mapping[str, Any] = field(default_factory=dict)  # settings of Task
    imitate: str | None = None  # one of DOCUMENTS, or OWN; None = be rewarded
    updates: int | None = None  # imitate from random weights, with the schedule of the warm-up

    @property
    def config(self) -> GRPOConfig:
        """The settings of the run; to imitate takes the learning rate and the sizes."""
        return replace(SUMMIT, **self.changes)

    @property
    def schedule(self) -> PretrainConfig:
        """With `updates`: the warm-up's settings, with other updates and learning rate."""
        return replace(WARMUP, steps=self.updates, lr=self.config.lr, seed=1)

    @property
    def every(self) -> int:
        """Steps between two evaluations."""
        return self.updates // 20 if self.updates else self.config.steps // 10


def imitating(documents: str, lr: float, updates: int | None = None) -> Variant:
    return Variant(imitate=documents, changes={"lr": lr}, updates=updates)


HARDEST = 0  # the seed of the base without torn pages that thinks to the end least often
FAMILIES: dict[str, dict[str, Variant]] = {
    "a thought or none": {
        "after a thought, lr 0.001": imitating("right answers", 1e-3, 400),
        "after a thought, lr 0.005": imitating("right answers", 5e-3, 400),
        "without a thought, lr 0.001": imitating("right answers, no thought", 1e-3, 2000),
        "without a thought, lr 0.005": imitating("right answers, no thought", 5e-3, 2000),
    },
    "torn pages": {
        "0.1": Variant(torn=0.1, seeds=range(5)),
        "0.03": Variant(torn=0.03, seeds=range(5)),
        "0": Variant(torn=0.0, seeds=range(10)),
    },
    "the hardest base, twice as long": {
        "0": Variant(torn=0.0, torn_seed=HARDEST, seeds=range(5), changes={"steps": 200}),
    },
    "equal terms": {
        "rewarded, lr 0.001": Variant(changes={"lr": 1e-3}),
        "shown right answers, lr 0.0001": imitating("right answers", 1e-4),
        "shown right answers, lr 0.001": imitating("right answers", 1e-3),
        "rejection sampling": Variant(imitate=OWN),
    },
    "paid for any thought": {
        "KL weight 0": Variant(task={"grade": any_thought}, changes={"kl_weight": 0.0})
    },
    "flipped rewards": {f"{p:g}": Variant(task={"flip": p}) for p in (0.3, 0.4, 0.45, 0.5)},
    "few questions": {"1": Variant(task={"questions": 1})},
    "group size": {"64 x 2": Variant(changes={"prompts_per_step": 64, "group_size": 2})},
    "group size, four rewards in ten flipped": {
        f"{p} x {g}": Variant(task={"flip": 0.4}, changes={"prompts_per_step": p, "group_size": g})
        for p, g in ((64, 2), (4, 32))
    },
    "entropy bonus": {f"{w:g}": Variant(changes={"entropy_weight": w}) for w in (0.01, 0.03, 0.1)},
    "sampling temperature": {f"{t:g}": Variant(changes={"temperature": t}) for t in (0.7, 1.3)},
}
"""By family and name. The run as it is, with five seeds, is in results.json."""


def start(variant: Variant, seed: int) -> nn.Module:
    """The policy before the run."""
    if variant.updates is None and variant.torn is None:
        return load_policy()
    own = seed if variant.torn_seed is None else variant.torn_seed
    policy = tiny_llama(own)
    if variant.torn is not None:
        list(warm_up(policy, replace(WARMUP, seed=own), torn=variant.torn))
    return policy.eval()


def train(variant: Variant, policy: nn.Module, seed: int) -> Iterator[int]:
    """As the variant says, in place; the steps that are done."""
    config = replace(variant.config, seed=seed)
    if variant.imitate is None:
        task = Task(generator=torch.Generator().manual_seed(seed), **variant.task)
        return (m.step for m in train_grpo(policy, task, config))
    if variant.imitate == OWN:
        return imitate(policy, own_right(policy, config), config)
    documents = DOCUMENTS[variant.imitate]
    if variant.updates is None:
        generator = torch.Generator().manual_seed(seed + 1)  # 0 made the shipped base
        return imitate(policy, map(documents, repeat(generator)), config)
    schedule = replace(variant.schedule, seed=seed + 1)
    return (m.step for m in pretrain(policy, documents, schedule))


def own_right(policy: nn.Module, config: GRPOConfig) -> Iterator[Batch]:
    """Online rejection sampling: the policy's own completions, of which the right ones are learned.

    DeepSeekMath (arXiv 2402.03300) calls it online RFT; it often means one round of samples.
    """
    order, sampling = (torch.Generator().manual_seed(config.seed) for _ in range(2))
    while True:
        prompts = Arithmetic().prompts(config.prompts_per_step, order)
        r, rewards = rollout(policy, Arithmetic(), prompts, config, sampling)
        right = r.completion_mask & (rewards == 1)[:, None]  # (N, T)
        yield r.input_ids, torch.cat([torch.zeros_like(r.prompt_mask), right], dim=1)


def imitate(policy: nn.Module, batches: Iterator[Batch], config: GRPOConfig) -> Iterator[int]:
    """Cross-entropy, with the optimizer and as many updates per step as in `train_grpo`."""
    optimizer = torch.optim.AdamW(policy.parameters(), config.lr, config.betas, weight_decay=0.0)
    for step in range(1, config.steps + 1):
        ids, mask = next(batches)
        for _ in range(config.inner_epochs if mask.any() else 0):
            optimizer.zero_grad()
            next_token_loss(policy(ids).logits, ids, mask).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
        yield step


def habits(policy: nn.Module) -> Results:
    """What a policy does of itself on held-out questions of the trained lengths."""
    generator, questions = torch.Generator().manual_seed(HABIT_SEED), []
    for length in TRAINED_LENGTHS:
        each = HABIT_QUESTIONS // len(TRAINED_LENGTHS)
        questions += draw_questions(each, generator, lengths=(length,), held_out=True)
    r = ask(policy, questions, seed=HABIT_SEED)
    found = {"correct": r.correct, "whole": r.thinking == r.lengths}  # a token for each term
    return {name: round(hits.double().mean().item(), 4) for name, hits in found.items()}


def measure(variant: Variant, one: Seed) -> Results:
    """One run: what the base does, and the scores on the way."""
    policy, curve = start(variant, one.seed), {}
    before = {} if variant.updates else {"base": habits(policy)}
    store.keep(curve, 0, scores(policy))
    for step in train(variant, policy, one.seed):
        if step % variant.every == 0:
            store.keep(curve, step, scores(policy))
    return {"seed": one.seed, **before, "curve": curve}


def settings(variant: Variant) -> Results:
    """All that decides how the runs go."""
    present = {
        "task": results.names(variant.task),
        "imitate": variant.imitate,
        "config": asdict(variant.config),
        "measured with": [results.evaluate.__kwdefaults__, HABIT_QUESTIONS, HABIT_SEED],
    }
    if variant.updates is not None:
        return {**present, "training": asdict(variant.schedule)}
    if variant.torn is None:
        return {**present, "base": base_checksum()}
    asked = arithmetic.warmup_documents.__kwdefaults__
    documents = {**asked, "torn": variant.torn, "rows": WARMUP_ROWS}
    return {**present, "base": [asdict(WARMUP), documents, variant.torn_seed]}


def store_of(family: str, name: str) -> Store:
    """Of one variant."""
    variant = FAMILIES[family][name]
    settings_now = partial(settings, variant)
    return Store("thinking.json", [*map(Seed, variant.seeds)], settings_now, (family, name))


# What docs/results.md shows.
COLUMNS = {
    "base: whole thoughts": lambda runs: spread([run["base"]["whole"] for run in runs], 3),
    "base: sampled": lambda runs: spread([run["base"]["correct"] for run in runs], 2),
    "sampled": at_the_end("accuracy", 2),
    "7 and 8 digits": at_the_end("harder", 2),
    "tokens of thought": at_the_end("thinking", 1),
}
TABLE = {
    "torn pages": {
        "0.1": "torn pages: 10% of the adding documents, as shipped",
        "0.03": "torn pages: 3%",
        "0": "torn pages: none",
    },
    "the hardest base, twice as long": {"0": "torn pages: none, the tenth base, 200 steps"},
    "equal terms": {
        "shown right answers, lr 0.0001": "shown correct answers instead, learning rate 1e-4",
        "shown right answers, lr 0.001": "shown correct answers instead, learning rate 1e-3",
        "rewarded, lr 0.001": "rewarded, learning rate 1e-3",
        "rejection sampling": "shown its own correct answers (online rejection sampling)",
    },
    "flipped rewards": {
        "0.3": "three rewards in ten flipped",
        "0.5": "half of the rewards flipped",
    },
    "group size, four rewards in ten flipped": {
        "64 x 2": "four rewards in ten flipped, groups of 2",
        "4 x 32": "four rewards in ten flipped, groups of 32",
    },
    "few questions": {"1": "one single question"},
    "entropy bonus": {"0.1": "with an entropy bonus, weight 0.1"},
    "sampling temperature": {
        "0.7": "sampled and trained at temperature 0.7",
        "1.3": "sampled and trained at temperature 1.3",
    },
}


def table() -> str:
    """One line per entry of TABLE: what the base does, and the scores after the run."""
    stored = store.load("thinking.json")
    names = [(title, stored[key][name]) for key in TABLE for name, title in TABLE[key].items()]
    return store.table(COLUMNS, ((title, one["runs"]) for title, one in names))


PARTS = {
    family: [(store_of(family, name), partial(measure, one)) for name, one in variants.items()]
    for family, variants in FAMILIES.items()
}
main = partial(store.command, PARTS)


if __name__ == "__main__":
    main()
