"""The package beside TRL and transformers: the same model, the same work, one thread each.

    python tests/benchmarks/peers.py            # about a minute; needs the extra "scale"
    python tests/benchmarks/peers.py --quick    # does it run? figures are rough

16 questions, 8 completions each, by the tiny Llama that ships in data/, stopping where it stops.
The learning rate is next to nothing, so that the lengths stay what they are. All sides take turns;
medians, with the range of the rounds in brackets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import minigrpo  # noqa: F401 (before torch: its threads are to sleep)

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.flop_counter import FlopCounterMode

from minigrpo import grpo
from minigrpo.arithmetic import (
    EOS,
    PAD,
    TAGS,
    Arithmetic,
    draw_questions,
    prompt_ids,
    running_totals,
    to_text,
)
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.llama import build_tokenizer, load_policy
from minigrpo.rewards import answer_reward
from minigrpo.runtime import setup
from minigrpo.sampling import sample

QUESTIONS, COMPLETIONS, LENGTH, LR = 16, 8, 16, 1e-9


def spread(values: list[float], digits: int) -> str:
    """Median, lowest and highest."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


# ---------------------------------------------------------------------------------------------
# sampling


def tokens_per_second(rounds: int) -> None:
    policy = load_policy()
    questions = draw_questions(QUESTIONS, torch.Generator().manual_seed(0))
    prompts = torch.stack([prompt_ids(question) for question in questions])

    def ours() -> int:
        rolled = sample(
            policy,
            prompts,
            completions_per_prompt=COMPLETIONS,
            max_new_tokens=LENGTH,
            eos_id=EOS,
            pad_id=PAD,
        )
        return int(rolled.completion_mask.sum())

    @torch.no_grad()
    def theirs() -> int:
        texts = policy.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            num_return_sequences=COMPLETIONS,
            do_sample=True,
            top_k=0,
            max_new_tokens=LENGTH,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        return int((texts[:, prompts.shape[1] :] != PAD).sum())

    rates: dict[str, list[float]] = {"sample": [], "generate": []}
    for _ in range(rounds + 1):  # the first round warms up
        for name, write in (("sample", ours), ("generate", theirs)):
            began = time.perf_counter()
            rates[name].append(write() / (time.perf_counter() - began))
    mine, other = rates["sample"][1:], rates["generate"][1:]
    ratio = spread([a / b for a, b in zip(mine, other)], 1)
    print(f"tokens per second: sample {spread(mine, 0)}, generate {spread(other, 0)}")
    print(f"   {ratio} times as many (target: 1.5 or more)")


# ---------------------------------------------------------------------------------------------
# training


def our_steps(steps: int, epochs: int, seed: int = 0) -> list[float]:
    """Seconds of each step of train_grpo."""
    config = GRPOConfig(
        steps=steps,
        prompts_per_step=QUESTIONS,
        group_size=COMPLETIONS,
        max_new_tokens=LENGTH,
        eos_id=EOS,
        pad_id=PAD,
        how="token_mean",
        inner_epochs=epochs,
        lr=LR,
        seed=seed,
    )
    return [m.seconds for m in train_grpo(load_policy(), Arithmetic(), config)]


def their_steps(steps: int, epochs: int, seed: int = 0) -> list[float]:
    """Seconds of each step of TRL's GRPOTrainer: one generation and its optimizer steps."""
    import transformers
    import trl
    from datasets import Dataset

    def reward(completion_ids: list[list[int]], answer: list[int], **_: object) -> list[float]:
        return [answer_reward(ids, right, TAGS) for ids, right in zip(completion_ids, answer)]

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            self.seconds.append(time.perf_counter() - self.began)

    questions = draw_questions(QUESTIONS * steps, torch.Generator().manual_seed(seed))
    rows = [
        {"prompt": to_text(prompt_ids(question)), "answer": running_totals(question)[-1]}
        for question in questions
    ]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_strategy="no",
            lr_scheduler_type="constant",
            learning_rate=LR,
            max_steps=steps * epochs,
            num_iterations=epochs,
            per_device_train_batch_size=QUESTIONS * COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=LENGTH,
        )
        trl.GRPOTrainer(
            model=load_policy(),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=build_tokenizer(),
            callbacks=[clock],
        ).train()
    return [sum(clock.seconds[i : i + epochs]) for i in range(0, len(clock.seconds), epochs)]


def samples_per_second(rounds: int, steps: int) -> None:
    for epochs in (1, 2):
        ours, theirs = [], []
        for seed in range(rounds):  # in turns
            ours.append(statistics.median(our_steps(steps, epochs, seed)))
            theirs.append(statistics.median(their_steps(steps, epochs, seed)))
        rows = QUESTIONS * COMPLETIONS
        mine, other = ([rows / s for s in seconds] for seconds in (ours, theirs))
        ratio = spread([a / b for a, b in zip(mine, other)], 1)
        print(f"completions trained on per second, {epochs} update(s) per batch:")
        print(f"   train_grpo {spread(mine, 0)}, TRL's GRPOTrainer {spread(other, 0)}")
        print(f"   {ratio} times as many (target: 2 or more)")


# ---------------------------------------------------------------------------------------------
# where the time goes


@contextmanager
def timed(*names: str) -> Iterator[dict[str, float]]:
    """Seconds spent in these functions of `grpo`, by name."""
    spent, originals = dict.fromkeys(names, 0.0), {name: getattr(grpo, name) for name in names}

    def watch(name: str) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            began = time.perf_counter()
            try:
                return originals[name](*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return call

    try:
        for name in names:
            setattr(grpo, name, watch(name))
        yield spent
    finally:
        for name in names:
            setattr(grpo, name, originals[name])


def shares(steps: int) -> None:
    with timed("sample", "_score", "_update") as spent:
        total = sum(our_steps(steps, epochs=2))
    parts = {"rollout": "sample", "scoring": "_score", "update": "_update"}
    told = ", ".join(f"{what} {spent[name] / total:.0%}" for what, name in parts.items())
    print(f"a step of train_grpo with 2 updates takes {total / steps:.3f} s: {told}")
    with FlopCounterMode(display=False) as counter:
        our_steps(1, epochs=2)
    rate = counter.get_total_flops() / (total / steps)
    best = peak()
    told = f"{rate / 1e9:.0f} of {best / 1e9:.0f} billion floating-point operations per second"
    print(f"   {rate / best:.0%} of what a large matrix product reaches: {told}")


def peak(n: int = 1024) -> float:
    """Floating-point operations per second in a square matrix product, float32."""
    a, b = torch.rand(n, n), torch.rand(n, n)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a rough and short run")
    quick = parser.parse_args(arguments).quick
    os.environ.setdefault("MINIGRPO_THREADS", "1")
    setup(seed=0)
    tokens_per_second(rounds=3 if quick else 30)
    shares(steps=3 if quick else 20)
    try:
        import trl  # noqa: F401
    except ImportError:
        print("TRL is not installed (pip install -e '.[scale]'): no comparison with it")
        return
    samples_per_second(rounds=1 if quick else 3, steps=3 if quick else 12)


if __name__ == "__main__":
    main()
