"""Run what notebook 10 shows with seeds: two trainers side by side, and stale rollouts.

    python tools/experiments/scaling_runs.py          what is not stored yet (ten minutes)
    python tools/experiments/scaling_runs.py --again  all of it

Writes data/results/scaling.json after each run; notebook 10 draws what it holds. The runs of TRL
need the extra `scale`. Where it's missing, a sentence says so and the other runs are made.
"""

from __future__ import annotations

import collections
import copy
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import store
import torch
from store import ROOT, Measure, Results, Store

from minigrpo import arithmetic, llama
from minigrpo.logprobs import completion_log_probs_and_entropy
from minigrpo.notebook.setup import setup
from minigrpo.objective import group_advantages
from minigrpo.sampling import left_pad, sample
from minigrpo.scaling.run import train_ours, train_trl
from minigrpo.scaling.trl import QUIET, problem_config, problem_rows, trl_settings
from minigrpo.text.models import load_pretrained

BASES = (ROOT / "data" / "text_llama", ROOT / "data" / "tiny_llama")

TRAINERS = {"ours": train_ours, "TRL": train_trl}
TRAINER_STEPS, TRAINER_SEEDS = 20, (0, 1, 2)
CORRECTIONS = ("none", "behavior", "proximal", "decoupled")  # see `stale_loss`
STALENESS = (0, 1, 4, 16)  # steps between the policy that writes and the one that learns
STALE_STEPS, STALE_SEEDS = 60, tuple(range(10))
SLOW, SLOW_SEEDS = 1e-4, STALE_SEEDS[:5]  # a smaller learning rate, with stale rollouts only


class Run(NamedTuple):
    """What is varied; a trainer's run has no staleness and no correction."""

    what: str  # a trainer, or "stale"
    staleness: int
    correction: str
    seed: int
    lr: float = 3e-4


RUNS = [Run(trainer, 0, "", seed) for seed in TRAINER_SEEDS for trainer in TRAINERS]
RUNS += [
    Run("stale", staleness, correction, seed)
    for seed in STALE_SEEDS
    for staleness in STALENESS
    # Without staleness the policies that wrote and that learn are one.
    for correction in (CORRECTIONS if staleness else CORRECTIONS[:2])
]
RUNS += [
    Run("stale", staleness, correction, seed, SLOW)
    for seed in SLOW_SEEDS
    for staleness in STALENESS[2:]
    for correction in CORRECTIONS
]


# The four functions of notebook 10, line by line (a test compares them).
def score(policy, r, temperature=1.0):
    # (N, T) log-probs of the completions
    text = r.prompt_ids, r.prompt_mask, r.completions, r.completion_mask
    return completion_log_probs_and_entropy(policy, *text, temperature=temperature)[0]


def written_by(writer, task, generator, groups=8, size=8):
    # a batch of rollouts and their advantages
    questions = task.prompts(groups, generator)
    ids, mask = left_pad(questions, arithmetic.PAD)
    ends = {"eos_id": arithmetic.EOS, "pad_id": arithmetic.PAD, "max_new_tokens": 16}
    r = sample(writer, ids, mask, completions_per_prompt=size, generator=generator, **ends)
    completions = [row[real] for row, real in zip(r.completions, r.completion_mask)]
    rewards = task.reward([q for q in questions for _ in range(size)], completions)
    return r, group_advantages(torch.tensor(rewards), size)


def stale_loss(correction, new, proximal, behavior, advantages, mask):
    A = advantages[:, None]
    old = {"none": new.detach(), "behavior": behavior}.get(correction, proximal)
    ratio = (new - old).exp()
    per_token = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    if correction == "decoupled":  # the truncated weight of exercise 10.3
        per_token = per_token * (proximal - behavior).exp().clamp(max=2.0)
    return per_token[mask].mean()


def train_stale(staleness, correction, steps=60, seed=0, every=10, lr=3e-4):
    policy, writer = llama.load_policy(), llama.load_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.99))
    past = collections.deque(maxlen=staleness + 1)  # the policies of the last steps
    task, generator = arithmetic.Arithmetic(), torch.Generator().manual_seed(seed)
    asked = arithmetic.draw_questions(128, torch.Generator().manual_seed(5), held_out=True)
    accuracy = []
    for step in range(1, steps + 1):
        past.append(copy.deepcopy(policy.state_dict()))
        writer.load_state_dict(past[0])  # `staleness` steps ago, or the base policy
        r, row_advantages = written_by(writer, task, generator)
        with torch.no_grad():
            proximal = score(policy, r)
        for _ in range(2):
            new, mask = score(policy, r), r.completion_mask
            loss = stale_loss(correction, new, proximal, r.log_probs, row_advantages, mask)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        if step % every == 0:
            accuracy.append(arithmetic.ask(policy, asked).of_length()["accuracy"])
    return accuracy


@cache
def trainers() -> dict[str, Any]:
    """The settings of the two trainers, their problems, and the version of TRL that is wanted."""
    config = problem_config(*load_pretrained(BASES[0], device="cpu"), steps=TRAINER_STEPS)
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    return {
        "ours": asdict(config),
        "TRL": {**QUIET, **trl_settings(config)},
        "version": re.findall(r'"trl([^;"]+)', project),
        "problems": store.of_data(problem_rows()),
    }


def settings() -> dict[str, Any]:
    """What decides how the runs go, beside the code of the package, to compare with stored ones."""
    generator = torch.Generator().manual_seed(5)
    return {
        "bases": {base.name: store.of_folder(base) for base in BASES},
        "trainer_steps": TRAINER_STEPS,
        "trainers": trainers(),
        "stale_steps": STALE_STEPS,
        "questions": store.of_data(arithmetic.draw_questions(128, generator, held_out=True)),
        "code": store.of_code(score, written_by, stale_loss, train_stale, measure),
    }


def measure(one: Run) -> dict[str, Any]:
    """One run: rewards of each batch, or the accuracy on held-out questions after every 5 steps."""
    setup(seed=0)
    torch.set_num_threads(1)
    if one.what == "stale":
        arguments = one.staleness, one.correction, STALE_STEPS, one.seed
        curve = train_stale(*arguments, every=5, lr=one.lr)
    else:
        torch.manual_seed(one.seed)
        curve = TRAINERS[one.what](TRAINER_STEPS, seed=one.seed)["rewards"]
    return {**one._asdict(), "curve": [round(value, 4) for value in curve]}


STORE = Store("scaling.json", RUNS, settings)


def where_trl_is(measure: Measure, names: list[Run]) -> Iterator[Results]:
    """Two runs at a time, without those of TRL where it's missing."""
    ours = [name for name in names if name.what != "TRL" or find_spec("trl")]
    if left_out := len(names) - len(ours):
        print(f"TRL is not installed, so {left_out} of its runs are left out.", flush=True)
    return store.in_parallel(measure, ours)


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, two runs at a time."""
    again = store.parser(__doc__).parse_args(arguments).again
    STORE.fill(measure, lambda run: f"ends at {run['curve'][-1]:.2f}", again, where_trl_is)


if __name__ == "__main__":
    main()
