"""The package beside TRL and transformers: the same model, the same work, one thread each.

    python tools/bench.py --only generate trainer        # needs the extra "scale"

16 questions, 8 completions each, by the tiny Llama that ships in data/, stopping where it stops.
The learning rate is next to nothing, so that the lengths stay what they are. All sides take turns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

from lines import Line, has_trl, over  # before torch: it imports minigrpo, whose threads sleep

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoTokenizer

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
from minigrpo.files import data_folder
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.llama import load_policy
from minigrpo.rewards import answer_reward
from minigrpo.sampling import sample

QUESTIONS, COMPLETIONS, LENGTH, LR = 16, 8, 16, 1e-9


# ---------------------------------------------------------------------------------------------
# sampling


def generate(quick: bool) -> list[Line]:
    """Tokens per second that `sample` and transformers' `generate` write."""
    rounds = 3 if quick else 30
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
    return [
        Line(
            "tokens per second, 16 x 8 completions",
            "generate of transformers",
            "transformers",
            mine,
            other,
            over(mine, other),
            "1.5 or more",
        )
    ]


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
        trainer = trl.GRPOTrainer(
            model=load_policy(),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(data_folder() / "tiny_llama"),
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [sum(clock.seconds[i : i + epochs]) for i in range(0, len(clock.seconds), epochs)]


def trainer(quick: bool) -> list[Line]:
    """Completions trained on per second, with one and with two updates per batch."""
    rounds, steps = (1, 3) if quick else (3, 12)
    lines = []
    for epochs in (1, 2) if has_trl() else ():
        ours, theirs = [], []
        for seed in range(rounds):  # in turns
            ours.append(statistics.median(our_steps(steps, epochs, seed)))
            theirs.append(statistics.median(their_steps(steps, epochs, seed)))
        rows = QUESTIONS * COMPLETIONS
        mine, other = ([rows / s for s in seconds] for seconds in (ours, theirs))
        updates = "1 update" if epochs == 1 else f"{epochs} updates"
        lines.append(
            Line(
                f"completions trained on per second, {updates} per batch",
                "GRPOTrainer of TRL",
                "trl",
                mine,
                other,
                over(mine, other),
                "2 or more",
            )
        )
    return lines
