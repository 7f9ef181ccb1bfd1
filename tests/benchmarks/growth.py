"""How the cost of a GRPO step grows: with the group, the completions, and the model's width.

    python tools/bench.py --only group_size length width

Each line doubles one size; the others stay at 16 questions, 8 completions of 16 tokens, 64 wide.
Every completion runs to its full length, so that the sizes are what they are said to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from lines import Line, alternate, over
from transformers import LlamaConfig, LlamaForCausalLM

from minigrpo.arithmetic import PAD, Arithmetic
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.llama import tiny_llama

BASE = {
    "prompts_per_step": 16,
    "group_size": 8,
    "max_new_tokens": 16,
    "pad_id": PAD,
    "inner_epochs": 2,
    "lr": 1e-9,
}


def llama(width: int) -> LlamaForCausalLM:
    """The tiny Llama, untrained and as wide as wanted."""
    like = tiny_llama().config.to_dict()
    heads = like["num_attention_heads"]
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "head_dim": width // heads}
    return LlamaForCausalLM(LlamaConfig(**(like | sizes))).eval()


def grow(size: str, settings: Mapping[int, Mapping[str, Any]], quick: bool) -> list[Line]:
    """One line for each size beside the one before it; `width` is the model's."""
    rounds = 3 if quick else 15
    runs = []
    for one in settings.values():
        config = GRPOConfig(**(BASE | {k: v for k, v in one.items() if k != "width"}))
        runs.append(train_grpo(llama(one.get("width", 64)), Arithmetic(), config))
    alternate(*(lambda run=run: next(run) for run in runs), repeats=1)  # warm up
    times = alternate(*(lambda run=run: next(run) for run in runs), repeats=rounds)
    return [
        Line(
            f"seconds per step of GRPO, {size} {large}",
            f"{size} {small}",
            "minigrpo",
            more,
            less,
            over(more, less),
            less=True,
        )
        for (small, less), (large, more) in pairwise(zip(settings, times))
    ]


def group_size(quick: bool) -> list[Line]:
    """Completions per question."""
    return grow("groups of", {n: {"group_size": n} for n in (4, 8, 16)}, quick)


def length(quick: bool) -> list[Line]:
    """Tokens per completion."""
    return grow("tokens per completion:", {n: {"max_new_tokens": n} for n in (8, 16, 32)}, quick)


def width(quick: bool) -> list[Line]:
    """Of the model, whose matrices have four times the entries when it doubles."""
    return grow("model width", {n: {"width": n} for n in (64, 128, 256)}, quick)
