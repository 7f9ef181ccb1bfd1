"""PPO beside GRPO, on the run of notebook 07: accuracy, time, memory, noise of the gradient.

    python tools/ppo.py          what is not stored yet (about 15 minutes on one core)
    python tools/ppo.py --again  all of it

Both get as many texts per step, as many updates on them, the same learning rate, clip and KL term.
What PPO has of its own is chosen on a seed that is not used again. Writes data/results/ppo.json
after each part.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("MINIGRPO_THREADS", "1")  # two are no faster for so small a model

import torch
from results import SCORES, base_checksum
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from minigrpo.arithmetic import Arithmetic, evaluate
from minigrpo.files import atomic_path
from minigrpo.grpo import StepMetrics, rollout, score, train_grpo
from minigrpo.llama import load_policy
from minigrpo.notebook.setup import setup
from minigrpo.objective import group_advantages, grpo_loss
from minigrpo.sampling import Rollouts
from minigrpo.study.experiments import SUMMIT
from minigrpo.study.ppo import (
    at_the_end,
    critic_of,
    gae,
    ppo_loss,
    state_values,
    train_ppo,
    whiten,
)

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "data" / "results" / "ppo.json"

SEARCH_SEED, SEEDS = 100, (0, 1, 2)
SEARCH = [{"critic_lr": lr, "lam": lam} for lr, lam in product((3e-4, 1e-3, 3e-3), (0.95, 1.0))]
EVERY = 10  # steps between two evaluations
ASLEEP = {"critic_lr": 0.0, "lam": 1.0}  # its critic says 0 to the end
BATCHES = {0: 64, 10: 64, 30: 256, 100: 512}  # steps done: batches to measure the noise with
LAMBDAS = (1.0, 0.95)
TIMED = 40  # steps of each, for their seconds

Results = dict[str, Any]


def settings() -> Results:
    """All that decides how the runs go, in a form that can be compared with a stored one."""
    present = {"base": base_checksum(), "config": asdict(SUMMIT), "search": SEARCH}
    present |= {"search_seed": SEARCH_SEED, "seeds": SEEDS}
    present |= {"asleep": ASLEEP, "every": EVERY, "batches": BATCHES, "lambdas": LAMBDAS}
    return json.loads(json.dumps(present))


# --------------------------------------------------------------------------------------------
# runs


class Run:
    """One training, and what was seen of it."""

    def __init__(
        self, base: nn.Module, seed: int, ppo_settings: Results | None = None, look: bool = True
    ) -> None:
        self.policy, config = copy.deepcopy(base), replace(SUMMIT, seed=seed)
        self.critic = None if ppo_settings is None else critic_of(self.policy)
        self.steps: Iterator[StepMetrics] = (
            train_grpo(self.policy, Arithmetic(), config)
            if ppo_settings is None
            else train_ppo(self.policy, self.critic, Arithmetic(), config, **ppo_settings)
        )
        self.seconds: list[float] = []
        self.value_loss: list[float] = []
        self.curve: dict[str, list[float]] = {name: [] for name in (*SCORES, "step")}
        self.looks = look  # at the held-out questions, every so often
        if look:
            self.look()

    def look(self) -> None:
        """Ask the policy the held-out questions."""
        self.curve["step"].append(len(self.seconds))
        scores = evaluate(self.policy)
        for name in SCORES:
            self.curve[name].append(round(scores[name], 4))

    def step(self) -> None:
        """One step of training."""
        metrics = next(self.steps)
        self.seconds.append(metrics.seconds)
        if self.critic is not None:
            self.value_loss.append(round(metrics.evaluation["value_loss"], 5))
        if self.looks and len(self.seconds) % EVERY == 0:
            self.look()

    def get_curves(self) -> Results:
        """What is stored."""
        critic = {"value_loss": self.value_loss[::EVERY]} if self.value_loss else {}
        return {"curve": self.curve, **critic}


def searched(base: nn.Module, ppo_settings: Results) -> Results:
    """A run of PPO with some settings of its own."""
    run = Run(base, SEARCH_SEED, ppo_settings)
    for _ in range(SUMMIT.steps):
        run.step()
    accuracy = round(fmean(run.curve["accuracy"]), 4)
    return {**ppo_settings, "mean_accuracy": accuracy, **run.get_curves()}


def best(search: list[Results]) -> Results:
    """The settings whose accuracy is highest on average over the run, so that early counts."""
    first = max(search, key=lambda run: run["mean_accuracy"])
    return {name: first[name] for name in SEARCH[0]}


def compared(base: nn.Module, seed: int, ppo_settings: Results) -> Results:
    """Three runs with one seed, and the noise on the way of the second."""
    of_each = {"grpo": None, "ppo": ppo_settings, "asleep": ASLEEP}
    runs = {name: Run(base, seed, its_settings) for name, its_settings in of_each.items()}
    noise = {}
    for step in range(SUMMIT.steps + 1):
        for run in runs.values() if step else ():
            run.step()
        if step in BATCHES:
            noise[str(step)] = noise_of_the_gradient(runs["ppo"], BATCHES[step], seed)
    results = {name: run.get_curves() for name, run in runs.items()}
    return {"seed": seed, **ppo_settings, **results, "noise": noise}


# --------------------------------------------------------------------------------------------
# noise


def advantages_of(values: Tensor, rollouts: Rollouts, rewards: Tensor) -> Results:
    """(N,) or (N, T): several ways to say how good the same texts were; values (N, T)."""
    mask, G = rollouts.completion_mask, SUMMIT.group_size
    rewards = rewards.to(values)
    per_token = at_the_end(rewards, rollouts)
    nothing = torch.zeros_like(values)
    return {
        "leave one out": group_advantages(rewards, G, scale="none", baseline="leave_one_out"),
        "group": group_advantages(rewards, G),
        "no critic": whiten(gae(per_token, nothing, mask, lam=1.0)[0], mask),
    } | {
        f"critic, lam {lam}": whiten(gae(per_token, values, mask, lam=lam)[0], mask)
        for lam in LAMBDAS
    }


def noise_of_the_gradient(run: Run, batches: int, seed: int) -> Results:
    """The policy gradient of a first update, ratio 1 and no KL, on fresh batches of texts."""
    generator = torch.Generator().manual_seed(1000 + seed)  # of other questions and texts
    policy, critic, parameters = run.policy, run.critic, list(run.policy.parameters())
    sums: dict[str, Gradients] = {}
    outcomes, predicted = [], []
    for _ in range(batches):
        prompts = Arithmetic().prompts(SUMMIT.prompts_per_step, generator)
        rollouts, rewards = rollout(policy, Arithmetic(), prompts, SUMMIT, generator)
        mask = rollouts.completion_mask
        with torch.no_grad():
            values = state_values(critic, rollouts)
        log_probs, _ = score(policy, rollouts, SUMMIT)
        gradients = {}
        for name, advantages in advantages_of(values, rollouts, rewards).items():
            loss_of = grpo_loss if advantages.dim() == 1 else ppo_loss
            loss, _ = loss_of(log_probs, log_probs.detach(), advantages, mask, how="token_mean")
            parts = torch.autograd.grad(loss, parameters, retain_graph=True)
            gradients[name] = torch.cat([part.flatten() for part in parts]).double()
            sums.setdefault(name, Gradients()).add(gradients[name], gradients["leave one out"])
        # What the critic said before the first token, in the middle, and before the last.
        columns = ((mask.sum(dim=1, keepdim=True) - 1) * torch.tensor([0, 0.5, 1])).round().long()
        outcomes.append(rewards)
        predicted.append(values.gather(1, columns).double())
    R, V = torch.cat(outcomes), torch.cat(predicted)  # (texts,), (texts, 3)
    explained = 1 - (R[:, None] - V).var(dim=0) / R.var()
    return {
        "reward": round(R.mean().item(), 4),
        "explained": [round(x, 3) for x in explained.tolist()],
        "gradients": {name: summed.beside(sums["leave one out"]) for name, summed in sums.items()},
    }


class Gradients:
    """What has to be kept of the gradients (P,) of many batches, and of another method's."""

    def __init__(self) -> None:
        self.count, self.total, self.squares, self.products = 0, 0.0, 0.0, 0.0

    def add(self, gradient: Tensor, other: Tensor) -> None:
        """The gradients of one more batch, this method's and the other's."""
        self.count += 1
        self.total = self.total + gradient
        self.squares += gradient @ gradient
        self.products += gradient @ other

    def beside(self, other: Gradients) -> Results:
        """Noise over signal, and the cosine of the mean with the other's; None if it drowns.

        The noise is the root of the covariance's trace, for one batch. The mean of B gradients
        still holds a B-th of that variance, which would make its norm too large. So the products
        of two means are taken as means over pairs of different batches.
        """
        B = self.count
        noise = (self.squares - self.total @ self.total / B) / (B - 1)
        signal = (self.total @ self.total - self.squares) / (B * (B - 1))
        others = (other.total @ other.total - other.squares) / (B * (B - 1))
        both = (self.total @ other.total - self.products) / (B * (B - 1))
        if signal <= 0 or others <= 0:
            return {"noise_to_signal": None, "cosine": None}
        ratio, cosine = (noise / signal).sqrt(), both / (signal * others).sqrt()
        return {"noise_to_signal": round(ratio.item(), 4), "cosine": round(cosine.item(), 4)}


# --------------------------------------------------------------------------------------------
# time and memory


def timing(base: nn.Module) -> Results:
    """Median seconds per step, and their ratio, step by step in turn: a busy machine slows both."""
    grpo, ppo = (
        Run(base, SEARCH_SEED, None, look=False),
        Run(base, SEARCH_SEED, SEARCH[0], look=False),
    )
    for _ in range(TIMED):
        grpo.step(), ppo.step()
    ratio = median(p / g for g, p in zip(grpo.seconds, ppo.seconds, strict=True))
    seconds = {"grpo": round(median(grpo.seconds), 4), "ppo": round(median(ppo.seconds), 4)}
    return {**seconds, "ratio": round(ratio, 2)}


def memory(base: nn.Module) -> Results:
    """Bytes of one network each, of all that is kept from step to step, and at the fullest."""
    policy, critic = (
        sum(p.numel() * p.element_size() for p in network.parameters())
        for network in (base, critic_of(base))
    )
    # Weights, their gradients, the two averages of Adam; of the reference the weights alone.
    resident = {"grpo": 4 * policy + policy, "ppo": 4 * policy + policy + 4 * critic}
    return {
        "policy": policy,
        "critic": critic,
        "kept": resident,
        "peak": {"grpo": peak(base, None), "ppo": peak(base, SEARCH[0])},
    }


def peak(base: nn.Module, ppo_settings: Results | None) -> int:
    """The most bytes of tensors at a time, from the copy of the base to the end of two steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run = Run(base, SEARCH_SEED, ppo_settings, look=False)
        run.step()
        run.step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


# --------------------------------------------------------------------------------------------
# what is stored


def stored() -> Results:
    """What was found with these settings."""
    results = json.loads(PATH.read_text("utf-8")) if PATH.is_file() else {}
    if results.get("settings") != settings():
        results = {}
    return {"settings": settings(), "time": {}, "memory": {}, "search": [], "runs": []} | results


def save(results: Results) -> None:
    """Written in one piece, one line per run."""
    lines = []
    for name, value in results.items():
        rows = (
            ",\n".join(f"  {json.dumps(run)}" for run in value) if isinstance(value, list) else ""
        )
        lines.append(f'"{name}": ' + (f"[\n{rows}]" if rows else json.dumps(value)))
    with atomic_path(PATH) as unfinished:
        unfinished.write_text("{" + ",\n".join(lines) + "}\n", "utf-8")


def show(name: str, run: Results) -> None:
    """A line about a run."""
    last = "  ".join(f"{score} {run['curve'][score][-1]:.3f}" for score in SCORES)
    print(f"{name:44} {last}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="also what is stored")
    options = parser.parse_args(arguments)
    setup(seed=0)
    if options.again:
        PATH.unlink(missing_ok=True)
    base, results = load_policy(), stored()
    if not results["memory"]:
        results["time"], results["memory"] = timing(base), memory(base)
        save(results)
    for ppo_settings in SEARCH[len(results["search"]) :]:
        results["search"].append(searched(base, ppo_settings))
        save(results)
        show(f"ppo {ppo_settings}", results["search"][-1])
    for seed in SEEDS[len(results["runs"]) :]:
        results["runs"].append(compared(base, seed, best(results["search"])))
        save(results)
        for name in ("grpo", "ppo", "asleep"):
            show(f"{name}, seed {seed}", results["runs"][-1][name])


if __name__ == "__main__":
    main()
