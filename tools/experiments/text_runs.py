"""The run of notebook 09 with both text models, and where almost no reward comes, three seeds each.

    python tools/experiments/text_runs.py          what is not stored yet (ten minutes on one core)
    python tools/experiments/text_runs.py --again  all of it

Writes data/results/text.json after each run; notebook 09 draws what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import store
import torch
from store import ROOT, Store
from text_models import FAMILIES
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.notebook.setup import setup
from minigrpo.text.models import load_pretrained
from minigrpo.text.problems import draw_rows, evaluate
from minigrpo.text.prompts import (
    Text,
    TextProblems,
    answer_reward,
    format_reward,
    stop_tokens,
    text_of,
    write,
)

SEEDS = (0, 1, 2)
PROBLEMS, PROBLEMS_SEED = 2000, 1  # for training
SCORES = ("form", "right", "length")
HELD_OUT, HELD_OUT_SEED = evaluate.__defaults__  # problems to measure on


def soft_reward(
    prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
) -> list[float]:
    """0.1 for each tag that occurs exactly once, as in notebook 09."""
    found = [re.findall(r"</?think>|</?answer>", text_of(text)) for text in completions]
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


RUNS = [Run(arm, seed) for arm, seed in product(ARMS, SEEDS)]


def config(arm: Arm, seed: int, stops: tuple[int, ...], pad_id: int) -> GRPOConfig:
    """The settings of one run, which are those of notebook 09."""
    return GRPOConfig(
        steps=arm.steps,
        prompts_per_step=16,
        group_size=8,
        max_new_tokens=40,
        inner_epochs=2,
        lr=1e-4,
        how="token_mean",
        kl_weight=0.01,
        evaluate_every=5,
        eos_id=stops,
        pad_id=pad_id,
        seed=seed,
    )


def asked(row: dict[str, str], chat: bool) -> dict[str, Any]:
    """A row of data, as a chat if it is to be one."""
    said = [{"role": "user", "content": row["prompt"].strip()}]
    return {**row, "prompt": said} if chat else row


def task_of(arm: Arm, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]) -> TextProblems:
    """The problems to train on, and what is paid for."""
    rows = draw_rows(PROBLEMS, torch.Generator().manual_seed(PROBLEMS_SEED))
    functions = [REWARDS[name] for name in arm.rewards]
    rows = [asked(row, arm.chat) for row in rows]
    return TextProblems(tokenizer, rows, functions, arm.weights, stops)


def base(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy before the run, with its tokenizer."""
    return load_pretrained(ROOT / "data" / f"text_{family}", device="cpu", dtype=torch.float32)


def scores(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: bool
) -> dict[str, float]:
    """`evaluate`, or the same of the same problems asked as chats."""
    if not chat:
        return evaluate(policy, tokenizer)
    drawn = draw_rows(HELD_OUT, torch.Generator().manual_seed(HELD_OUT_SEED), held_out=True)
    rows = [asked(row, chat) for row in drawn]
    prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    rollouts, texts = write(policy, tokenizer, prompts, seed=HELD_OUT_SEED)
    return {
        "form": sum(format_reward(prompts, texts)) / HELD_OUT,
        "right": sum(answer_reward(prompts, texts, answer=answers)) / HELD_OUT,
        "length": rollouts.completion_mask.sum(dim=1).double().mean().item(),
    }


@cache
def drawn() -> dict[str, str]:
    """The problems to train and to measure on, as checksums."""
    rows = draw_rows(PROBLEMS, torch.Generator().manual_seed(PROBLEMS_SEED))
    asked = draw_rows(HELD_OUT, torch.Generator().manual_seed(HELD_OUT_SEED), held_out=True)
    return {"training": store.of_data(rows), "held out": store.of_data(asked)}


def settings() -> dict[str, Any]:
    """What decides how the runs go, beside the code of the package, to compare with stored ones."""
    present: dict[str, Any] = {
        "base": {f: store.of_folder(ROOT / "data" / f"text_{f}") for f in FAMILIES},
        "arms": {name: asdict(arm) for name, arm in ARMS.items()},
        "rows": [PROBLEMS, PROBLEMS_SEED, HELD_OUT, HELD_OUT_SEED],
        "drawn": drawn(),
        "config": asdict(config(Arm("gpt2"), 0, (0,), 1)),
        "code": store.of_code(soft_reward, asked, task_of, scores, measure),
    }
    for varied in ("steps", "seed", "eos_id", "pad_id"):
        del present["config"][varied]
    return present


def measure(one: Run) -> dict[str, Any]:
    """One run; the scores on held-out problems before it and on the way."""
    setup(seed=0)
    arm = ARMS[one.arm]
    policy, tokenizer = base(arm.family)
    stops = stop_tokens(tokenizer, policy)
    held_out = partial(scores, tokenizer=tokenizer, chat=arm.chat)
    curve: dict[str, list[float]] = {name: [] for name in ("step", *SCORES)}
    keep(curve, 0, held_out(policy))
    own = config(arm, one.seed, stops, tokenizer.pad_token_id)
    for m in train_grpo(policy, task_of(arm, tokenizer, stops), own, evaluate=held_out):
        if m.evaluation:
            keep(curve, m.step, m.evaluation)
    return {**one._asdict(), "curve": curve}


def keep(curve: dict[str, list[float]], step: int, evaluation: Mapping[str, float]) -> None:
    """One more point, rounded to four digits."""
    curve["step"].append(step)
    for name in SCORES:
        curve[name].append(round(evaluation[name], 4))


STORE = Store("text.json", RUNS, settings)


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing."""
    again = store.parser(__doc__).parse_args(arguments).again
    STORE.fill(measure, lambda run: f"right {run['curve']['right'][-1]:.2f}", again)


if __name__ == "__main__":
    main()
