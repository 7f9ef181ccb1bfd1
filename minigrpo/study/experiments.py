"""The run in which the tiny Llama learns to think, and what is changed in it, one thing at a time.

`SUMMIT` is that run; `EXPERIMENTS` lists what is different in others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minigrpo.arithmetic import EOS, PAD, Arithmetic, evaluate, warmup_documents
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.llama import tiny_llama
from minigrpo.objective import VARIANTS
from minigrpo.pretrain import PretrainConfig, PretrainMetrics, documents_batch, pretrain
from minigrpo.rewards import Tags, format_reward, split_parts

WARMUP = PretrainConfig(steps=400, lr=5e-3, matrix_lr=None, weight_decay=0.01, warmup=30)
WARMUP_ROWS = 128
"""How the base model is trained before any reward; AdamW alone, since Muon does no better here."""
SUMMIT = GRPOConfig(
    steps=100, prompts_per_step=16, group_size=8, max_new_tokens=16, eos_id=EOS, pad_id=PAD,
    lr=1e-4, inner_epochs=2, how="token_mean", kl_weight=0.01,
)  # fmt: skip
"""16 questions x 8 completions, two updates on each batch, a hundred times."""


def warmup_batch(n: int, generator: torch.Generator, **options: object) -> tuple[Tensor, Tensor]:
    """`warmup_documents` (with these options) as ids and loss mask (n, S), for `pretrain`."""
    return documents_batch(warmup_documents(n, generator, **options), PAD)


def warm_up(
    policy: nn.Module, config: PretrainConfig = WARMUP, **settings: object
) -> Iterator[PretrainMetrics]:
    """Teach a policy to add and to answer in form, without reward; settings of warmup_documents."""
    return pretrain(policy, partial(warmup_batch, WARMUP_ROWS, **settings), config)


def only_form(completion: Tensor, answer: int, tags: Tags, *, given: int) -> float:
    """A reward that looks at the form and not at the answer."""
    return format_reward(completion, tags, given=given)


def any_thought(completion: Tensor, answer: int, tags: Tags, *, given: int) -> float:
    """A reward for a thought in its place, whatever it says and whatever is answered."""
    parts = split_parts(completion, tags, given=given)
    return float(parts is not None and len(parts.answer) == 1 and len(parts.thought) > 0)


@dataclass(frozen=True)
class Experiment:
    """What is different from the summit."""

    changes: Mapping[str, Any] = field(default_factory=dict)  # settings of GRPOConfig
    task: Mapping[str, Any] = field(default_factory=dict)  # settings of Arithmetic
    supervised: float | None = None  # by demonstrations, so many complete; None = by reward
    own_base: Mapping[str, Any] | None = None  # of `warmup_documents`, a base for each seed

    @property
    def config(self) -> GRPOConfig:
        """The settings of the run."""
        return replace(SUMMIT, **self.changes)


EXPERIMENTS: dict[str, Experiment] = {
    "the run of notebook 07": Experiment(),
    "a warm-up of its own for each seed": Experiment(own_base={}),
    "one demonstration in five complete": Experiment(own_base={"complete": 0.2}),
    "no room to think": Experiment(task={"thinking": False}),
    "reward for the form only": Experiment(task={"grade": only_form}),
    "reward for any thought": Experiment(task={"grade": any_thought}),
    "supervised, the same demonstrations": Experiment(supervised=0.0),
    "supervised, right demonstrations": Experiment(supervised=1.0),
    "no baseline": Experiment({"baseline": "none", "scale": "none"}),
    "no division by the std": Experiment({"scale": "none"}),
    "one ratio per sequence": Experiment({"level": "sequence"}),
    "1 update per batch": Experiment({"inner_epochs": 1}),
    "4 updates per batch": Experiment({"inner_epochs": 4}),
    "KL weight 0": Experiment({"kl_weight": 0.0}),
    "KL weight 0.1": Experiment({"kl_weight": 0.1}),
    "KL weight 1": Experiment({"kl_weight": 1.0}),
    **{name: Experiment(dict(settings)) for name, settings in VARIANTS.items()},
}
"""Each is the first with one thing changed; the last six take a variant's settings."""


@dataclass(frozen=True)
class Point:
    """Where a run stands."""

    step: int  # steps done; for supervised training, updates done / updates per step
    seconds: float  # spent on training so far, evaluation left out
    scores: Mapping[str, float]  # what `evaluate` measures on held-out questions


def run(
    experiment: Experiment,
    base: nn.Module,  # stays as it is
    *,
    seed: int = 0,  # of the training; the questions of the evaluation are always the same
    steps: int = SUMMIT.steps,  # supervised training does as many updates as the summit would
    every: int = 10,  # steps between two points
    n: int = 512,  # questions per evaluation
) -> Iterator[Point]:
    """Carry out an experiment on a copy of the base model; a point before, during and after it."""
    policy = copy.deepcopy(base)
    if experiment.own_base is not None:
        policy = tiny_llama(seed).to(next(base.parameters()).device)
        for _ in warm_up(policy, replace(WARMUP, seed=seed), **experiment.own_base):
            pass
        policy.eval()
    asked = {key: experiment.task[key] for key in experiment.task.keys() - {"grade"}}
    measure = partial(evaluate, n=n, **asked)
    yield Point(0, 0.0, measure(policy))
    if experiment.supervised is not None:  # on batches of as many rows as the summit's
        rows, updates = SUMMIT.prompts_per_step * SUMMIT.group_size, SUMMIT.inner_epochs
        documents = partial(warmup_batch, rows, complete=experiment.supervised)
        for m in pretrain(policy, documents, supervised_config(steps, seed)):
            if m.step % (every * updates) == 0 or m.step == steps * updates:
                yield Point(m.step // updates, m.seconds, measure(policy))
        return
    config = replace(experiment.config, seed=seed, steps=steps, evaluate_every=every)
    seconds = 0.0
    for m in train_grpo(policy, Arithmetic(**experiment.task), config, evaluate=measure):
        seconds += m.seconds
        if m.evaluation:
            yield Point(m.step, seconds, m.evaluation)


def supervised_config(steps: int, seed: int) -> PretrainConfig:
    """As many updates as `steps` of the summit."""
    seed += 1  # other documents than those of the warm-up
    return replace(WARMUP, steps=steps * SUMMIT.inner_epochs, lr=1e-3, warmup=0, seed=seed)
