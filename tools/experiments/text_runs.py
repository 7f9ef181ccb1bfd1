"""The run of notebook 09 with both text models, and where almost no reward comes, three seeds each.

    python tools/experiments/text_runs.py          what is not stored yet (ten minutes on one core)
    python tools/experiments/text_runs.py --again  all of it

Writes data/results/text.json after each run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import store
import torch
from store import ROOT, Results, Store
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.notebook.setup import setup
from minigrpo.text import prompts as text
from minigrpo.text.models import load_pretrained
from minigrpo.text.problems import draw_rows
from minigrpo.text.prompts import Text, answer_reward, format_reward

FAMILIES = ("gpt2", "llama")
PROBLEMS, PROBLEMS_SEED = 2000, 1  # for training
SCORES = ("form", "right", "length")
HELD_OUT, HELD_OUT_SEED = 128, 5  # problems to measure on


def soft_reward(
    prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
) -> list[float]:
    """0.1 for each tag that occurs exactly once, as in notebook 09."""
    found = [re.findall(r"</?think>|</?answer>", text.text_of(one)) for one in completions]
    return [sum(0.1 for tag in set(tags) if tags.count(tag) == 1) for tags in found]


@dataclass(frozen=True)
class Arm:
    """A base model, how it is asked, and what it is rewarded for."""

    family: str
    chat: bool = False  # as it never was asked in its warm-up, so almost no answer is right
    rewards: tuple[str, ...] = ("form", "answer")
    weights: tuple[float, ...] = (1.0, 2.0)
    steps: int = 30


REWARDS = {"form": format_reward, "answer": answer_reward, "tags": soft_reward}
ARMS = {
    **{family: Arm(family) for family in FAMILIES},
    "chat, answer": Arm("gpt2", True, ("answer",), (1.0,), 60),
    "chat, answer and tags": Arm("gpt2", True, ("answer", "tags"), (1.0, 1.0), 60),
}


class Run(NamedTuple):
    """What is varied."""

    arm: str
    seed: int


RUNS = [Run(arm, seed) for arm, seed in product(ARMS, range(3))]


def config(arm: Arm, seed: int, stops: tuple[int, ...], pad_id: int) -> GRPOConfig:
    """The settings of one run, which are those of notebook 09."""
    return GRPOConfig(
        steps=arm.steps, prompts_per_step=16, group_size=8, max_new_tokens=40, inner_epochs=2,
        lr=1e-4, how="token_mean", kl_weight=0.01, evaluate_every=5, eos_id=stops, pad_id=pad_id,
        seed=seed,
    )  # fmt: skip


def problems(chat: bool, held_out: bool) -> list[dict[str, Any]]:
    """To train or to measure on, as chats if they are to be."""
    n, seed = (HELD_OUT, HELD_OUT_SEED) if held_out else (PROBLEMS, PROBLEMS_SEED)
    rows = draw_rows(n, torch.Generator().manual_seed(seed), held_out=held_out)
    said = [[{"role": "user", "content": row["prompt"].strip()}] for row in rows]
    return [{**row, "prompt": new} for row, new in zip(rows, said)] if chat else rows


def base(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy before the run, with its tokenizer."""
    return load_pretrained(ROOT / "data" / f"text_{family}", device="cpu", dtype=torch.float32)


def scores(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: bool
) -> dict[str, float]:
    """As `minigrpo.text.problems.evaluate`, but it may ask in chats."""
    rows = problems(chat, held_out=True)
    prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    rollouts, texts = text.write(policy, tokenizer, prompts, seed=HELD_OUT_SEED)
    return {
        "form": sum(format_reward(prompts, texts)) / HELD_OUT,
        "right": sum(answer_reward(prompts, texts, answer=answers)) / HELD_OUT,
        "length": rollouts.completion_mask.sum(dim=1).double().mean().item(),
    }


@cache
def drawn() -> dict[str, str]:
    """The problems to train and to measure on, as checksums."""
    return {k: store.of_data(problems(False, k == "held out")) for k in ("training", "held out")}


def settings() -> Results:
    """What decides how the runs go, beside the code of the package."""
    common = asdict(config(Arm("gpt2"), 0, (0,), 1))
    for varied in ("steps", "seed", "eos_id", "pad_id"):
        del common[varied]
    return {
        "base": {f: store.of_folder(ROOT / "data" / f"text_{f}") for f in FAMILIES},
        "arms": {name: asdict(arm) for name, arm in ARMS.items()},
        "rows": [PROBLEMS, PROBLEMS_SEED, HELD_OUT, HELD_OUT_SEED],
        "drawn": drawn(),
        "config": common,
        "code": store.of_code(soft_reward, problems, scores, measure),
    }


def measure(one: Run) -> Results:
    """One run; the scores on held-out problems before it and on the way."""
    setup(seed=0)
    arm, curve = ARMS[one.arm], {}
    policy, tokenizer = base(arm.family)
    stops = text.stop_tokens(tokenizer, policy)
    functions, rows = [REWARDS[name] for name in arm.rewards], problems(arm.chat, held_out=False)
    task = text.TextProblems(tokenizer, rows, functions, arm.weights, stops)
    held_out = partial(scores, tokenizer=tokenizer, chat=arm.chat)
    store.keep(curve, 0, held_out(policy))
    own = config(arm, one.seed, stops, tokenizer.pad_token_id)
    for m in train_grpo(policy, task, own, evaluate=held_out):
        if m.evaluation:
            store.keep(curve, m.step, m.evaluation)
    return {**one._asdict(), "curve": curve}


STORE = Store("text.json", RUNS, settings)
main = partial(STORE.main, measure)

if __name__ == "__main__":
    main()
