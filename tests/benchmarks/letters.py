"""Does the run of notebook 03 keep its promise? The letter e, over several seeds.

    python tests/benchmarks/letters.py            # 2 to 4 minutes
    python tests/benchmarks/letters.py --quick    # does it run? one seed each, and few steps

Without a penalty: steps and seconds until a batch has a share of e of 0.8. With the recommended
penalty: how much e, and how much the reference is surprised by the text. What a run has led to is
measured on prompts that no run is trained on.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Iterator
from statistics import fmean

import torch
from torch import nn

from minigrpo.corpus import CharTokenizer
from minigrpo.files import data_folder
from minigrpo.gpt import load_gpt
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.logprobs import token_log_probs
from minigrpo.notebook.setup import setup
from minigrpo.rewards import TextTask, letter_share
from minigrpo.sampling import left_pad, sample

PROMPTS = ["ROMEO:", "JULIET:", "HENRY:", "My lord", "O, ", "To be, or"]
HELD_OUT = ["PORTIA:", "HAMLET:", "Good morrow", "I am "]
CHARACTERS = 24
SHARE, SECONDS = 0.8, 40.0  # to reach without a penalty, and in how long
PENALTY, TIMES, NATS = 1.5, 2.5, 0.5  # the recommended one; share of e, and surprise it may cost
SEEDS = range(5)


@torch.no_grad()
def measure(policy: nn.Module, reference: nn.Module, rows: int = 512) -> tuple[float, float]:
    """Share of e, and the reference's surprise in nats per character, on the held-out prompts."""
    tokenizer = CharTokenizer()
    each = rows // len(HELD_OUT)
    ids, mask = left_pad([tokenizer.encode(text) for text in HELD_OUT for _ in range(each)])
    generator = torch.Generator().manual_seed(123)
    written = sample(policy, ids, mask, max_new_tokens=CHARACTERS, generator=generator)
    log_probs = token_log_probs(reference, written.input_ids, written.attention_mask)
    share = fmean(letter_share(tokenizer.decode(row)) for row in written.completions)
    return share, -log_probs[:, -CHARACTERS:].mean().item()


def run(policy: nn.Module, seed: int, steps: int, kl_weight: float) -> Iterator[StepMetrics]:
    """The settings of notebook 03, for as many steps as wanted."""
    config = GRPOConfig(
        steps=steps,
        prompts_per_step=4,
        group_size=16,
        max_new_tokens=CHARACTERS,
        level="sequence",
        inner_epochs=2,
        lr=3e-4,
        kl_weight=kl_weight,
        seed=seed,
    )
    return train_grpo(policy, TextTask(PROMPTS), config)


def without_penalty(base: nn.Module, seeds: range, steps: int) -> None:
    print(f"no penalty: until a batch has a share of e of {SHARE}, in {SECONDS:.0f} s")
    print("seed   step   seconds   share after the run   within")
    kept = 0
    for seed in seeds:
        policy, spent, reached = copy.deepcopy(base), 0.0, None
        for m in run(policy, seed, steps, kl_weight=0.0):
            spent += m.seconds
            if reached is None and m.reward >= SHARE:
                reached = (m.step, spent)
        share, _ = measure(policy, base)
        good = reached is not None and reached[1] < SECONDS and share >= SHARE
        kept += good
        step, took = reached or (0, float("nan"))
        print(
            f"{seed:4} {step:6} {took:9.1f} {share:21.3f}   {'yes' if good else 'NO'}", flush=True
        )
    print(f"{kept} of {len(seeds)} seeds\n")


def with_penalty(base: nn.Module, seeds: range, steps: int) -> None:
    base_share, base_nll = measure(base, base)
    print(f"penalty {PENALTY}: {TIMES} times the e of the reference, for {NATS} nats at most")
    print("seed   share of e   times   surprise, nats per character   more   within")
    print(f"none {base_share:12.3f} {1:7.1f} {base_nll:30.3f} {0:6.2f}")
    kept = 0
    for seed in seeds:
        policy = copy.deepcopy(base)
        for _ in run(policy, seed, steps, kl_weight=PENALTY):
            pass
        share, nll = measure(policy, base)
        times, more = share / base_share, nll - base_nll
        good = times >= TIMES and more <= NATS
        kept += good
        line = f"{seed:4} {share:12.3f} {times:7.1f} {nll:30.3f} {more:6.2f}"
        print(f"{line}   {'yes' if good else 'NO'}", flush=True)
    print(f"{kept} of {len(seeds)} seeds")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed each, and few steps")
    quick = parser.parse_args(arguments).quick
    os.environ.setdefault("MINIGRPO_THREADS", "1")
    setup(seed=0)
    base = load_gpt(data_folder() / "char_gpt.safetensors").eval()
    seeds, steps = (SEEDS[:1], 3) if quick else (SEEDS, 25)
    without_penalty(base, seeds, steps)
    with_penalty(base, seeds, steps)


if __name__ == "__main__":
    main()
