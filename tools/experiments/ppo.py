"""PPO beside GRPO, on the run of notebook 07: accuracy, time, memory, noise of the gradient.

Both have the same settings. What PPO has of its own is chosen on a seed that is not used again.
Writes data/results/ppo.json after each part, 15 minutes on one core in all.
"""

import copy
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import NamedTuple

import store
import torch
from results import base_checksum, scores
from store import Results, Seed, Store
from torch import Tensor, nn

from minigrpo.arithmetic import Arithmetic
from minigrpo.grpo import rollout, score, train_grpo
from minigrpo.llama import load_policy
from minigrpo.notebook.setup import setup
from minigrpo.objective import group_advantages, grpo_loss
from minigrpo.sampling import Rollouts
from minigrpo.study import ppo as study
from minigrpo.study.experiments import SUMMIT
from minigrpo.study.ppo import gae, whiten


class Own(NamedTuple):
    """What PPO has of its own."""

    critic_lr: float
    lam: float


SEARCH = [Own(lr, lam) for lr, lam in product((3e-4, 1e-3, 3e-3), (0.95, 1.0))]
SEARCH_SEED, SEEDS = 100, [Seed(0), Seed(1), Seed(2)]
ASLEEP = Own(0.0, 1.0)  # its critic says 0 to the end
EVERY = 10  # steps between two evaluations
BATCHES = {10: 64, 30: 256}  # steps done: batches to measure the noise with
TIMED = 40  # steps of each, for their seconds
ARMS = ("grpo", "ppo", "asleep")


def settings() -> Results:
    """All that decides how the runs go."""
    present = {"base": base_checksum(), "config": asdict(SUMMIT), "search": SEARCH}
    present |= {"search_seed": SEARCH_SEED, "seeds": SEEDS}
    return {**present, "asleep": ASLEEP, "every": EVERY, "batches": BATCHES}


class Run:
    """One training, and what was seen of it."""

    def __init__(self, seed: int, own: Own | None = None, look: bool = True) -> None:
        self.policy, config, task = load_policy(), replace(SUMMIT, seed=seed), Arithmetic()
        self.seconds: list[float] = []
        self.curve: dict[str, list[float]] = {}
        if own is None:
            self.steps = train_grpo(self.policy, task, config)
        else:
            self.critic = study.critic_of(self.policy)
            self.steps = study.train_ppo(self.policy, self.critic, task, config, **own._asdict())
        if look:  # at the held-out questions, every so often
            store.keep(self.curve, 0, scores(self.policy))

    def step(self) -> None:
        """One step of training."""
        self.seconds.append(next(self.steps).seconds)
        if self.curve and len(self.seconds) % EVERY == 0:
            store.keep(self.curve, len(self.seconds), scores(self.policy))


def searched(own: Own) -> Results:
    """A run of PPO with some settings of its own."""
    run = Run(SEARCH_SEED, own)
    for _ in range(SUMMIT.steps):
        run.step()
    accuracy = round(fmean(run.curve["accuracy"]), 4)
    return {**own._asdict(), "mean_accuracy": accuracy, "curve": run.curve}


def best(search: list[Results]) -> Own:
    """The settings whose accuracy is highest on average over the run, so that early counts."""
    first = max(search, key=lambda run: run["mean_accuracy"])
    return Own(first["critic_lr"], first["lam"])


def compared(own: Own, one: Seed) -> Results:
    """Three runs with one seed, and the noise on the way of the second."""
    runs = {name: Run(one.seed, its) for name, its in zip(ARMS, (None, own, ASLEEP))}
    noise = {}
    for step in range(1, SUMMIT.steps + 1):
        for run in runs.values():
            run.step()
        if step in BATCHES:
            noise[str(step)] = noise_of_the_gradient(runs["ppo"], BATCHES[step], one.seed)
    curves = {name: {"curve": run.curve} for name, run in runs.items()}
    return {"seed": one.seed, **own._asdict(), **curves, "noise": noise}


def advantages_of(values: Tensor, rollouts: Rollouts, rewards: Tensor) -> dict[str, Tensor]:
    """(N,) or (N, T): three ways to say how good the same texts were; values (N, T)."""
    mask, rewards = rollouts.completion_mask, rewards.to(values)
    per_token, nothing = study.at_the_end(rewards, rollouts), torch.zeros_like(values)
    return {
        "group": group_advantages(rewards, SUMMIT.group_size),
        "no critic": whiten(gae(per_token, nothing, mask, lam=1.0)[0], mask),
        "critic, lam 1.0": whiten(gae(per_token, values, mask, lam=1.0)[0], mask),
    }


def noise_of_the_gradient(run: Run, batches: int, seed: int) -> Results:
    """The policy gradient of a first update, ratio 1 and no KL, on fresh batches of texts."""
    generator = torch.Generator().manual_seed(1000 + seed)  # of other questions and texts
    policy, parameters = run.policy, list(run.policy.parameters())
    kept: dict[str, list[Tensor]] = {}
    for _ in range(batches):
        prompts = Arithmetic().prompts(SUMMIT.prompts_per_step, generator)
        rollouts, rewards = rollout(policy, Arithmetic(), prompts, SUMMIT, generator)
        mask = rollouts.completion_mask
        with torch.no_grad():
            values = study.state_values(run.critic, rollouts)
        log_probs, _ = score(policy, rollouts, SUMMIT)
        for name, advantages in advantages_of(values, rollouts, rewards).items():
            loss_of = grpo_loss if advantages.dim() == 1 else study.ppo_loss
            loss, _ = loss_of(log_probs, log_probs.detach(), advantages, mask, how="token_mean")
            parts = torch.autograd.grad(loss, parameters, retain_graph=True)
            kept.setdefault(name, []).append(torch.cat([part.flatten() for part in parts]))
    found = {name: noise_to_signal(torch.stack(one)) for name, one in kept.items()}
    return {"gradients": {name: {"noise_to_signal": value} for name, value in found.items()}}


def noise_to_signal(gradients: Tensor) -> float | None:
    """The noise of one batch over the signal, of gradients (B, P); None if the signal drowns.

    The noise is the root of the covariance's trace. The mean of B gradients still holds a B-th of
    that variance, so it's taken off before the root gives the signal.
    """
    noise = gradients.var(dim=0).sum()
    signal = gradients.mean(dim=0).square().sum() - noise / len(gradients)
    return None if signal <= 0 else round((noise / signal).sqrt().item(), 4)


def timing() -> Results:
    """Median seconds per step, and their ratio, step by step in turn: a busy machine slows both."""
    grpo, ppo = Run(SEARCH_SEED, None, look=False), Run(SEARCH_SEED, SEARCH[0], look=False)
    for _ in range(TIMED):
        grpo.step(), ppo.step()
    ratio = median(p / g for g, p in zip(grpo.seconds, ppo.seconds, strict=True))
    seconds = {"grpo": round(median(grpo.seconds), 4), "ppo": round(median(ppo.seconds), 4)}
    return {**seconds, "ratio": round(ratio, 2)}


def memory(base: nn.Module) -> Results:
    """Bytes that are kept from step to step."""
    policy, critic = (
        sum(p.numel() * p.element_size() for p in network.parameters())
        for network in (base, study.critic_of(copy.deepcopy(base)))
    )
    # Weights, their gradients, the two averages of Adam; of the reference the weights alone.
    return {"kept": {"grpo": 4 * policy + policy, "ppo": 4 * policy + policy + 4 * critic}}


SEARCHED = Store("ppo.json", SEARCH, settings, key="search")
COMPARED = Store("ppo.json", SEEDS, settings)


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing."""
    again = store.options(arguments).again
    setup(seed=0)
    if again or "time" not in SEARCHED.part():
        beside = {"time": timing(), "memory": memory(load_policy())}
        SEARCHED.save(SEARCHED.stored(), **beside)
    SEARCHED.fill(searched, again)
    COMPARED.fill(partial(compared, best(SEARCHED.stored())), again)


if __name__ == "__main__":
    main()
