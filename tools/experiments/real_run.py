"""GRPO on a real model, SmolLM2-135M-Instruct, on a laptop's processor: the runs of notebook 11.

    python tools/experiments/smollm2.py smollm2            the model, once
    python tools/experiments/real_run.py smollm2           every run that is not stored yet
    python tools/experiments/real_run.py smollm2 --seed 0  one seed of the run that learns

A run takes 5 to 20 minutes. Writes data/results/real_run.json after each; notebook 11 draws what
it holds.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import store
import torch
from store import Results, Store

from minigrpo import grpo
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.notebook.setup import setup
from minigrpo.rewards import pass_at_k
from minigrpo.text.models import load_pretrained
from minigrpo.text.prompts import answer_reward, decode_completion, format_reward, write
from minigrpo.text.shots import SHOTS, Epochs, line_ends, rows, tags_reward

REWARDS, WEIGHTS = (tags_reward, format_reward, answer_reward), (0.4, 0.1, 1.0)
TOKENS = 26  # of a completion, at most
HELD_OUT = 256
MIDWAY = 64  # of them, to save time
AT_ONCE = 64  # held-out questions
TRANSCRIPTS = 12  # the first of the held-out questions
ASKED, SAMPLES = 32, 8  # before training: questions, and completions of each


SHAPE = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}  # of SmolLM2-135M


class Run(NamedTuple):
    """What is varied: which problems are shown solved, the learning rate, the seed, the data."""

    shots: str
    lr: float
    seed: int
    losses: float = 0.5  # the fraction of the training questions that are losses


RUNS = [
    *(Run("one loss", 1e-5, seed) for seed in (0, 1, 2)),
    Run("no loss", 2e-5, 0),  # both at once, and each alone
    Run("no loss", 1e-5, 0),
    Run("one loss", 2e-5, 0),
    Run("one loss", 1e-4, 0),  # the rate of notebook 07
    Run("no loss", 2e-5, 0, 0.28),
]


def config(run: Run, stops: tuple[int, ...], pad_id: int) -> GRPOConfig:
    """The settings of one run."""
    return GRPOConfig(
        steps=20,
        prompts_per_step=8,
        group_size=8,
        max_new_tokens=TOKENS,
        rows_per_pass=16,
        how="token_mean",
        lr=run.lr,
        evaluate_every=10,
        eos_id=stops,
        pad_id=pad_id,
        seed=run.seed,
    )


class Lab:
    """A model, its tokenizer, and the problems as they are asked in one run."""

    def __init__(self, folder: Path, shots: str, losses: float = 0.5) -> None:
        self.policy, self.tokenizer = load_pretrained(folder, device="cpu", dtype=torch.float32)
        self.stops = line_ends(self.policy, self.tokenizer)
        self.shown = SHOTS[shots]
        self.training = with_losses(rows(shots, held_out=False), losses)
        self.held_out = rows(shots, held_out=True)[:HELD_OUT]

    @property
    def task(self) -> Epochs:
        return Epochs(self.tokenizer, self.training, REWARDS, WEIGHTS, self.stops)

    def write(self, asked: Sequence[Mapping[str, str]], **changes: Any) -> list[str]:
        """One completion of each, or several."""
        settings = {"max_new_tokens": TOKENS, "eos_id": self.stops, "seed": 5, **changes}
        texts = []
        for at in range(0, len(asked), AT_ONCE):
            prompts = [row["prompt"] for row in asked[at : at + AT_ONCE]]
            r, _ = write(self.policy, self.tokenizer, prompts, **settings)
            completions = r.completions.cpu()
            texts += [decode_completion(self.tokenizer, row, self.stops) for row in completions]
        return texts


def with_losses(asked: Sequence[dict[str, str]], fraction: float) -> list[dict[str, str]]:
    """All gains, and the first losses, so that these are the given fraction; in the same order."""
    gains = sum(row["kind"] == "gets" for row in asked)
    left = round(gains * fraction / (1 - fraction))
    chosen = []
    for row in asked:
        left -= row["kind"] == "loses"
        if row["kind"] == "gets" or left >= 0:
            chosen.append(row)
    return chosen


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
        scores[way] = {"right": mean(hits), "form": mean(format_reward(prompts, texts))}
        for kind in ("gets", "loses"):
            some = [hit for hit, row in zip(hits, asked) if row["kind"] == kind]
            scores[way] |= {kind: mean(some), f"{kind}, questions": len(some)}
        scores[way]["transcripts"] = texts[:TRANSCRIPTS]
    return scores


def ask(lab: Lab) -> dict[str, float]:
    """Before training: how often a completion is right, one of 8 is, and a group differs."""
    asked = lab.training[:ASKED]
    texts = lab.write(asked, completions_per_prompt=SAMPLES)
    several = [row for row in asked for _ in range(SAMPLES)]
    hits = torch.tensor(right(several, texts)).view(ASKED, SAMPLES)
    correct = hits.sum(dim=1).int().tolist()
    return {
        "pass@1": mean([pass_at_k(SAMPLES, c, 1) for c in correct]),
        "pass@8": mean([pass_at_k(SAMPLES, c, SAMPLES) for c in correct]),
        "groups that differ": mean([float(0 < c < SAMPLES) for c in correct]),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def timed(name: str) -> Iterator[list[float]]:
    """Seconds of each call of a function of the loop, within a block."""
    seconds: list[float] = []
    function = getattr(grpo, name)

    def watched(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            seconds.append(time.perf_counter() - began)

    with patch.object(grpo, name, watched):
        yield seconds


def measure(folder: Path, run: Run) -> Results:
    """One run: before, on the way, after. Another run with the same shots has the same before."""
    same = [one for one in STORE.stored() if one["shots"] == run.shots and STORE.name(one) != run]
    before = same[0] if same else None
    setup(seed=0)
    torch.set_num_threads(2)
    lab = Lab(folder, run.shots, run.losses)
    run_config = config(run, lab.stops, lab.tokenizer.pad_token_id)
    result: Results = {**run._asdict(), "steps": []}
    same = before and before["losses"] == run.losses
    result["ask"] = before["ask"] if same else ask(lab)
    result["held out"] = {"0": before["held out"]["0"] if before else evaluate(lab)}
    with timed("rollout") as sampling, timed("score") as scoring:
        for m in train_grpo(lab.policy, lab.task, run_config):
            texts = [
                decode_completion(lab.tokenizer, row, lab.stops)
                for row in m.rollouts.completions[: run_config.group_size]
            ]
            parts = sum(sampling), sum(scoring)
            result["steps"].append(
                {
                    **{name: rounded(getattr(m, name)) for name in METRICS},
                    "seconds": [rounded(s) for s in (*parts, m.seconds - sum(parts))],
                    "rows that differ": int((m.advantages != 0).sum()),
                    "first group": texts,
                }
            )
            sampling.clear()
            scoring.clear()
            print(f"{m.step:3} reward {m.reward:.2f} equal {m.frac_reward_zero_std:.2f} "
                  f"{m.seconds:.0f} s", flush=True)  # fmt: skip
            if m.step % run_config.evaluate_every == 0:
                n = HELD_OUT if m.step == run_config.steps else MIDWAY
                result["held out"][str(m.step)] = evaluate(lab, n)
                sampling.clear()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on a Mac, else in KiB
    result["peak GiB"] = rounded(peak / 2 ** (30 if sys.platform == "darwin" else 20))
    return result


METRICS = (
    "reward frac_reward_zero_std entropy grad_norm ratio_min ratio_max mean_length truncated loss"
).split()


def rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def settings() -> Results:
    """What decides how the runs go, beside the model and the code of the package."""
    common = asdict(config(RUNS[0], (0,), 0))
    for varied in ("lr", "seed", "eos_id", "pad_id"):
        del common[varied]
    data = {shots: [rows(shots, held_out=side) for side in (False, True)] for shots in SHOTS}
    sizes = [HELD_OUT, MIDWAY, AT_ONCE, TRANSCRIPTS, ASKED, SAMPLES]
    return {
        "config": common,
        "rows": store.of_data(data),
        "sizes": sizes,
        "weights": WEIGHTS,
        "code": store.of_code(tags_reward, right, ask),
    }


STORE = Store("real_run.json", RUNS, settings)


def check_model(folder: Path) -> None:
    """End with a sentence unless the folder has the model that the stored runs are of."""
    file = folder / "config.json"
    found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if any(found.get(key) != size for key, size in SHAPE.items()):
        what = "a model of another size" if found else "no config.json"
        made = "tools/experiments/smollm2.py makes it"
        sys.exit(f"{folder}: expected SmolLM2-135M-Instruct ({made}), got {what}")


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, one run after the other."""
    parser = store.parser(__doc__)
    parser.add_argument("folder", type=Path, help="the model that smollm2.py makes")
    seeds = [run.seed for run in RUNS if run._replace(seed=0) == RUNS[0]._replace(seed=0)]
    parser.add_argument("--seed", type=int, choices=seeds, help="only this one of the first runs")
    options = parser.parse_args(arguments)
    check_model(options.folder)
    wanted = RUNS if options.seed is None else [RUNS[0]._replace(seed=options.seed)]
    shown = [{k: row[k] for k in ("question", "answer")} for row in rows(held_out=True)]
    STORE.fill(
        partial(measure, options.folder),
        lambda run: f"right {[*run['held out'].values()][-1]['sampled']['right']:.2f}",
        options.again,
        only=wanted,
        questions=shown[:TRANSCRIPTS],
    )


if __name__ == "__main__":
    main()
