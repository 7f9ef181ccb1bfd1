"""GRPO on a real model, SmolLM2-135M-Instruct: the runs of notebook 11.

    python tools/experiments/real_run.py FOLDER  # a run takes 5 to 20 minutes on a laptop's cores

FOLDER has the model, as smollm2.py makes it. Writes data/results/real_run.json after each run, and
real_steps.json, what the explorer shows.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import store
import torch
from store import Results, Store

from minigrpo.files import atomic_path
from minigrpo.grpo import GRPOConfig, frozen_copy, rollout, train_grpo
from minigrpo.notebook import explorer
from minigrpo.notebook.setup import setup
from minigrpo.rewards import pass_at_k
from minigrpo.sampling import Rollouts
from minigrpo.text import prompts as text
from minigrpo.text.models import load_pretrained
from minigrpo.text.prompts import answer_reward, format_reward, thought_and_answer
from minigrpo.text.shots import Epochs, line_ends, rows, tags_reward

REWARDS, WEIGHTS = (tags_reward, format_reward, answer_reward), (0.4, 0.1, 1.0)
TOKENS = 26  # of a completion, at most
HELD_OUT, MIDWAY = 256, 64  # questions; fewer on the way, to save time
AT_ONCE = 64  # held-out questions
TRANSCRIPTS = 12  # the first of the held-out questions
ASKED, SAMPLES = 32, 8  # before training: questions, and completions of each
RECORDED = (1, 2, 3, 4, 5, 7, 10, 12, 15, 20)  # steps that the explorer shows
METRICS = ("reward", "frac_reward_zero_std", "entropy", "grad_norm", "ratio_min", "ratio_max")
METRICS += ("mean_length", "truncated", "loss", "seconds")
WIDTH = 576  # of SmolLM2-135M


class Run(NamedTuple):
    """What is varied: which problems are shown solved, the learning rate, the seed, the data."""

    shots: str
    lr: float
    seed: int
    losses: float = 0.5  # the fraction of the training questions that are losses
    rank: int = 0  # of LoRA's adapters on every linear layer; 0 = all weights learn


RUNS = [
    *(Run("one loss", 1e-5, seed) for seed in (0, 1, 2)),
    *(Run("one loss", 1e-4, seed, rank=32) for seed in (0, 1)),  # LoRA
    Run("one loss", 1e-5, 0, rank=32),  # at the learning rate of all weights
    Run("no loss", 2e-5, 0),  # both at once, and each alone
    Run("no loss", 1e-5, 0),
    Run("one loss", 2e-5, 0),
    Run("one loss", 1e-4, 0),  # the rate of notebook 07
    Run("no loss", 2e-5, 0, 0.28),
]


def config(run: Run, stops: tuple[int, ...], pad_id: int) -> GRPOConfig:
    """The settings of one run."""
    return GRPOConfig(
        steps=20, prompts_per_step=8, group_size=8, max_new_tokens=TOKENS, rows_per_pass=16,
        how="token_mean", lr=run.lr, evaluate_every=10, eos_id=stops, pad_id=pad_id, seed=run.seed,
    )  # fmt: skip


class Lab:
    """A model, its tokenizer, and the problems as they are asked in one run."""

    def __init__(self, folder: Path, run: Run, device: str) -> None:
        self.policy, self.tokenizer = load_pretrained(folder, device=device, dtype=torch.float32)
        if self.policy.config.hidden_size != WIDTH:
            sys.exit(f"{folder}: expected SmolLM2-135M-Instruct, which smollm2.py makes")
        if run.rank:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=run.rank, lora_alpha=2 * run.rank, target_modules="all-linear")
            torch.manual_seed(run.seed)
            self.policy = get_peft_model(self.policy, lora).to(device)
        self.stops = line_ends(self.policy, self.tokenizer)
        self.training = with_losses(rows(run.shots, held_out=False), run.losses)
        self.held_out = rows(run.shots, held_out=True)[:HELD_OUT]
        self.config = config(run, self.stops, self.tokenizer.pad_token_id)
        self.task = Epochs(self.tokenizer, self.training, REWARDS, WEIGHTS, self.stops)

    def texts(self, completions: torch.Tensor) -> list[str]:
        """Of ids (N, T)."""
        return [text.decode_completion(self.tokenizer, row, self.stops) for row in completions]

    def write(self, asked: Sequence[Mapping[str, str]], **changes: Any) -> list[str]:
        """One completion of each, or several."""
        settings = {"max_new_tokens": TOKENS, "eos_id": self.stops, "seed": 5, **changes}
        texts = []
        for at in range(0, len(asked), AT_ONCE):
            prompts = [row["prompt"] for row in asked[at : at + AT_ONCE]]
            rollouts, _ = text.write(self.policy, self.tokenizer, prompts, **settings)
            texts += self.texts(rollouts.completions)
        return texts


def with_losses(asked: Sequence[dict[str, str]], fraction: float) -> list[dict[str, str]]:
    """All gains, and the first losses, so that these are the given fraction; in the same order."""
    gains = sum(row["kind"] == "gets" for row in asked)
    losses = [row for row in asked if row["kind"] == "loses"]
    losses = losses[: round(gains * fraction / (1 - fraction))]
    return [row for row in asked if row["kind"] == "gets" or row in losses]


def right(asked: Sequence[Mapping[str, str]], texts: Sequence[str]) -> list[float]:
    """1 for each text that keeps to the form and has the right answer."""
    prompts, answers = [row["prompt"] for row in asked], [row["answer"] for row in asked]
    return answer_reward(prompts, texts, answer=answers)


def evaluate(lab: Lab, n: int = HELD_OUT) -> Results:
    """Held-out questions, greedy and sampled: shares of right answers, by kind, and of the form."""
    asked = lab.held_out[:n]
    scores: Results = {"questions": len(asked)}
    for way, settings in (("greedy", {"top_k": 1}), ("sampled", {})):
        texts = lab.write(asked, **settings)
        hits = right(asked, texts)
        prompts = [row["prompt"] for row in asked]
        scores[way] = {"right": fmean(hits), "form": fmean(format_reward(prompts, texts))}
        for kind in ("gets", "loses"):
            some = [hit for hit, row in zip(hits, asked) if row["kind"] == kind]
            scores[way] |= {kind: fmean(some), f"{kind}, questions": len(some)}
        scores[way]["transcripts"] = texts[:TRANSCRIPTS]
    return scores


def ask(lab: Lab, asked: Sequence[Mapping[str, str]]) -> Results:
    """Of 8 completions: how often one is right, any, the most frequent answer; groups differ."""
    texts = lab.write(asked, completions_per_prompt=SAMPLES)
    several = [row for row in asked for _ in range(SAMPLES)]
    hits = torch.tensor(right(several, texts)).view(-1, SAMPLES)
    correct = hits.sum(dim=1).int().tolist()
    groups = [texts[at : at + SAMPLES] for at in range(0, len(texts), SAMPLES)]
    return {
        "pass@1": fmean([pass_at_k(SAMPLES, c, 1) for c in correct]),
        "pass@8": fmean([pass_at_k(SAMPLES, c, SAMPLES) for c in correct]),
        "maj@8": fmean(most(group) == row["answer"] for group, row in zip(groups, asked)),
        "groups that differ": fmean([float(0 < c < SAMPLES) for c in correct]),
        "completions": groups,
    }


def most(texts: Sequence[str]) -> str | None:
    """The answer that most completions give, the earliest of equals; None if none has the form."""
    written = [parts.answer[0] for text in texts if (parts := thought_and_answer("", text))]
    return max(written, key=written.count, default=None)


def measure(folder: Path, device: str, run: Run) -> Results:
    """One run: before, on the way, after."""
    setup(seed=0)
    torch.set_num_threads(2)
    lab, steps = Lab(folder, run, device), []
    training, unseen = lab.training[:ASKED], lab.held_out[:ASKED]
    before, unseen_before = ask(lab, training), ask(lab, unseen)
    held_out = {"0": evaluate(lab)}
    for m in train_grpo(lab.policy, lab.task, lab.config):
        one = {name: rounded(getattr(m, name)) for name in METRICS}
        one["rows that differ"] = int((m.advantages != 0).sum())
        one["first group"] = lab.texts(m.rollouts.completions[: lab.config.group_size])
        steps.append(one)
        print(f"{m.step:3} reward {m.reward:.2f} {m.seconds:.0f} s", flush=True)
        if m.step % lab.config.evaluate_every == 0:
            last = m.step == lab.config.steps
            held_out[str(m.step)] = evaluate(lab, HELD_OUT if last else MIDWAY)
    asked = {"before": unseen_before, "after": ask(lab, unseen)}
    if run != RUNS[0]:  # the texts of one run are enough
        for answers in (before, *asked.values()):
            del answers["completions"]
    found = {"steps": steps, "ask": before, "asked": asked, "held out": held_out}
    on = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {**run._asdict(), **found, "on": on}


def record(folder: Path, device: str) -> None:
    """The first run without its evaluations: two groups of some steps, and one fixed question."""
    setup(seed=0)
    torch.set_num_threads(2)
    lab, steps, rewards = Lab(folder, RUNS[0], device), [], {}
    reference = frozen_copy(lab.policy)
    task = Epochs(lab.tokenizer, lab.held_out[:1], REWARDS, WEIGHTS, lab.stops)
    fixed = task.prompts(1, torch.Generator())

    def question(ids: torch.Tensor) -> str:
        return lab.tokenizer.decode(ids).rpartition("Q: ")[2].partition(".")[0]

    def ask() -> tuple[Rollouts, torch.Tensor]:
        own = torch.Generator(device).manual_seed(0)  # so that the run isn't disturbed
        return rollout(lab.policy, task, fixed, lab.config, own)

    asked, decode = ask(), lab.tokenizer.decode
    for m in train_grpo(lab.policy, lab.task, lab.config):
        rewards[m.step] = rounded(m.reward / sum(WEIGHTS))
        print(f"{m.step:3} reward {m.reward:.2f} {m.seconds:.0f} s", flush=True)
        if m.step in RECORDED:
            of = (m, lab.policy, reference, lab.config, lambda i: decode([i]), question, asked)
            steps.append(explorer.snapshot(*of, groups=2))
        if m.step + 1 in RECORDED:
            asked = ask()
    about = "SmolLM2 solves word problems of one step. A right answer in the right form earns 1.5, "
    about += "a wrong one in that form 0.5."
    kept = explorer.data(steps, about, ("mean reward of the batch, as a fraction of 1.5", rewards))
    with atomic_path(store.FOLDER / "real_steps.json") as unfinished:
        unfinished.write_text(json.dumps(kept, separators=(",", ":")) + "\n", "utf-8")


def rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def settings() -> Results:
    """What decides how the runs go, beside the model and the code of the package."""
    common = asdict(config(RUNS[0], (0,), 0))
    for varied in ("lr", "seed", "eos_id", "pad_id"):
        del common[varied]
    shots = {run.shots for run in RUNS}
    data = {shown: [rows(shown, held_out=side) for side in (False, True)] for shown in shots}
    return {
        "config": common,
        "rows": store.of_data(data),
        "sizes": [HELD_OUT, MIDWAY, AT_ONCE, TRANSCRIPTS, ASKED, SAMPLES],
        "weights": WEIGHTS,
        "code": store.of_code(tags_reward, right, ask, most),
    }


STORE = Store("real_run.json", RUNS, settings)


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, one run after the other."""
    seeds = [run.seed for run in RUNS[:3]]
    folder = {"type": Path, "help": "the model that smollm2.py makes"}
    seed = {"type": int, "choices": seeds, "help": "only this one of the first runs"}
    device = {"choices": ["cpu", "cuda"], "default": "cpu"}
    steps = {"action": "store_true", "help": "the first one for the explorer, and nothing else"}
    more = {"--seed": seed, "--device": device, "--record": steps}
    options = store.options(arguments, folder=folder, **more)
    if options.record:
        return record(options.folder, options.device)
    shown = rows(held_out=True)[:TRANSCRIPTS]
    STORE.fill(
        partial(measure, options.folder, options.device),
        options.again,
        only=RUNS if options.seed is None else [RUNS[options.seed]],
        questions=[{k: row[k] for k in ("question", "answer")} for row in shown],
    )


if __name__ == "__main__":
    main()
