"""Sweep the updates per batch for notebook 03, with its loop and its losses (the solutions).

Writes data/results/reuse.json after each run, 15 minutes on one core in all.
"""

import copy
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import product
from typing import NamedTuple
from unittest import mock

import store
import torch
from store import ROOT, Results, Store
from torch import Tensor, nn

from minigrpo.corpus import CharTokenizer
from minigrpo.exercises.form import source
from minigrpo.gpt import load_gpt
from minigrpo.logprobs import token_log_probs
from minigrpo.notebook.setup import setup
from minigrpo.sampling import Rollouts, left_pad, sample

BASE = ROOT / "data" / "char_gpt.safetensors"
PROMPTS = ("ROMEO:", "JULIET:", "My lord", "To be, or")
GROUP, LENGTH, LR = 16, 24, 3e-4  # completions per prompt, their characters, Adam's rate
BATCHES = 12  # of a run with several passes; those with one, and those that recover, take 16
LOSSES = ("plain", "ratio", "clip")
page = import_module("minigrpo.exercises.03")
CODE = (
    *(page.letter_share, page.group_advantages, page.reinforce, page.train),
    *(page.sequence_ratio, page.recovery, page.clipped_objective),
)


class Run(NamedTuple):
    """What is varied."""

    loss: str  # REINFORCE, with the ratio, or with ratio and clip
    passes: int  # updates on each batch
    plan: str  # "": as the page does it; gradients cut to norm 1; or passes on batch 1 alone
    seed: int


RUNS = [
    *(Run("plain", 1, "", seed) for seed in range(3)),
    *(Run(loss, passes, "", s) for passes, loss, s in product((2, 4, 8, 16), LOSSES, range(3))),
    *(Run(loss, 4, "norm 1", seed) for loss, seed in product(LOSSES, range(3))),
    *(Run("ratio", 4, plan, seed) for plan, seed in product(("same Adam", "new Adam"), range(3))),
]


class CutAdam(torch.optim.Adam):
    """Adam that first cuts the gradient to norm 1, if it's longer."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def passes(run: Run) -> list[list[int]]:
    """For each call of `train`, the updates on each batch."""
    if run.plan in ("same Adam", "new Adam"):
        return page.recovery(run.plan == "new Adam", 16)
    return [[run.passes] * (16 if run.passes == 1 else BATCHES)]


def score(policy: nn.Module, batch: Rollouts) -> Tensor:
    """(N, T), the log-prob of every character that was written."""
    return token_log_probs(policy, batch.input_ids, batch.attention_mask)[:, -LENGTH:]


def loss_of(policy: nn.Module, batch: Rollouts, advantages: Tensor, *, kind: str) -> Tensor:
    log_probs, mask = score(policy, batch), batch.completion_mask
    if kind == "plain":
        return page.reinforce(log_probs, mask, advantages)
    ratio = page.sequence_ratio(log_probs, batch.log_probs, mask)
    clipped = page.clipped_objective(ratio, advantages, 0.2) if kind == "clip" else None
    return -(ratio * advantages if clipped is None else clipped).mean()


def settings() -> Results:
    """All that decides how the runs go."""
    numbers = {"group": GROUP, "length": LENGTH, "lr": LR, "batches": BATCHES}
    code = store.of_code(*map(source, CODE), CutAdam, passes, score, loss_of)
    return {"base": store.of_file(BASE), "prompts": PROMPTS, **numbers, "code": code}


def measure(run: Run) -> Results:
    """Train the char GPT; of each batch its reward, how it surprises the base, and a completion."""
    setup(seed=0)
    tokenizer, base = CharTokenizer(), load_gpt(BASE).eval()
    ids, mask = left_pad([tokenizer.encode(prompt) for prompt in PROMPTS])
    generator, seen = torch.Generator().manual_seed(run.seed), []
    counts = {"max_new_tokens": LENGTH, "completions_per_prompt": GROUP}

    def reward(batch: Rollouts) -> Tensor:
        seen.append(batch)
        return page.letter_share(batch.completions, batch.completion_mask, tokenizer.encode("e"))

    policy, compare = copy.deepcopy(base), partial(page.group_advantages, group_size=GROUP)
    write = partial(sample, prompt_ids=ids, attention_mask=mask, generator=generator, **counts)
    curve = []
    cut = mock.patch.object(torch.optim, "Adam", CutAdam) if run.plan == "norm 1" else nullcontext()
    with cut:
        for updates in passes(run):
            loss = partial(loss_of, kind=run.loss)
            curve += page.train(policy, write, reward, compare, loss, passes=updates, lr=LR)
    with torch.no_grad():
        nll = [-score(base, batch).mean().item() for batch in seen]
    return {
        **run._asdict(),
        "reward": [round(float(value), 4) for value in curve],
        "nll": [round(value, 4) for value in nll],
        "text": [tokenizer.decode(batch.completions[0]) for batch in seen],
    }


STORE = Store("reuse.json", RUNS, settings)
main = partial(store.command, {"reuse": [(STORE, measure)]}, over=store.in_parallel)

if __name__ == "__main__":
    main()
