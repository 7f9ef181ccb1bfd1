"""Write down what TRL answers, for those who do not have it installed.

    python tests/make_trl_answers.py

Needs TRL (pip install -e '.[scale]'). Writes tests/data/trl_answers.safetensors: the cases
themselves, not the seed that made them, and for each of them the answers of TRL's GRPOTrainer in
float64. The same versions of TRL and torch write the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from minigrpo.files import atomic_path

FILE = Path(__file__).resolve().parent / "data" / "trl_answers.safetensors"
LOSS_CASES, REWARD_CASES = 40, 10
SCALES = ("group", "batch", "none")

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo", max_completion_length=8),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0),
    "gspo": dict(
        loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
    ),
    "grpo_kl": dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False),
    "grpo_kl_corrected": dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=True),
    "sequence_kl_corrected": dict(
        loss_type="bnpo",
        importance_sampling_level="sequence",
        beta=0.1,
        use_bias_correction_kl=True,
    ),
    "grpo_entropy": dict(loss_type="grpo", entropy_coef=0.01),
    "dapo_kl_entropy": dict(
        loss_type="dapo",
        epsilon_high=0.28,
        beta=0.02,
        use_bias_correction_kl=True,
        entropy_coef=0.05,
    ),
}
"""Settings in TRL's words: arguments of GRPOConfig."""


class Case(NamedTuple):
    """What a loss is computed from; 0 where the mask is 0."""

    log_probs: Tensor  # (N, T), as the other three
    old_log_probs: Tensor | None
    ref_log_probs: Tensor
    entropy: Tensor
    advantages: Tensor  # (N,)
    mask: Tensor  # (N, T) of 0 and 1


# ---------------------------------------------------------------------------------------------
# random cases


def random_case(generator: torch.Generator) -> Case:
    """From 2 to 8 ragged rows of up to 9 tokens, on, near and far beyond every clip."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    def chosen(numbers: list[float], count: int) -> Tensor:
        values = torch.tensor(numbers, dtype=torch.float64)
        return values[torch.randint(len(values), (count,), generator=generator)][:, None]

    N = int(torch.randint(2, 9, (), generator=generator))
    T = int(torch.randint(1, 10, (), generator=generator))
    lengths = torch.randint(0, T + 1, (N,), generator=generator)  # 0: masked completely
    lengths[rand(N) < 0.3] = T
    mask = (torch.arange(T) < lengths[:, None]).long()
    if rand(1) < 0.2:  # holes, as tool calls leave them
        mask *= (rand(N, T) < 0.8).long()
    new = -4 * rand(N, T)
    # Each row strays from the old policy by its own amount: some not at all, some by so little
    # that only the clip of GSPO sees it, some by a factor of thousands.
    old = new - chosen([0.0, 6e-4, 0.02, 0.3, 1.0, 4.0, 8.0], N) * (2 * rand(N, T) - 1)
    drift = chosen([0.0, 0.0, 3e-4, 0.3, 1.0], N) * (2 * rand(N, 1) - 1)  # of a whole row
    old = old - drift
    ref = new - chosen([0.0, 0.1, 1.0, 3.0], N) * (2 * rand(N, T) - 1)
    advantages = torch.randn(N, dtype=torch.float64, generator=generator)
    advantages[rand(N) < 0.15] = 0.0
    entropy = 3 * rand(N, T)
    return Case(new * mask, old * mask, ref * mask, entropy * mask, advantages, mask)


def random_rewards(generator: torch.Generator) -> tuple[Tensor, int]:
    """Rewards (N,) and the size of their groups: numbers, right or wrong, equal, nearly equal."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    P, G = (int(torch.randint(low, 9, (), generator=generator)) for low in (1, 2))
    rewards = rand(P, G)
    kind = torch.randint(6, (P, 1), generator=generator)
    rewards = torch.where(kind == 1, (rewards < 0.5).double(), rewards)
    rewards = torch.where(kind == 2, 10 * rand(P, 1).expand(P, G), rewards)
    rewards = torch.where(kind == 3, 5.7 + 1e-3 * rewards, rewards)
    rewards = torch.where(kind == 4, 100 * (rewards - 0.5), rewards)
    return rewards.flatten(), G


# ---------------------------------------------------------------------------------------------
# the file


def trl_losses(cases: list[Case]) -> dict[str, Tensor]:
    """What TRL says of every case under every variant, under names "variant/what"."""
    from trl_peer import trl_loss

    tensors = {}
    for variant, settings in VARIANTS.items():
        losses, gradients, entropy_gradients, metrics = zip(
            *(trl_loss(case, **settings) for case in cases)
        )
        tensors[f"{variant}/loss"] = torch.stack(losses)
        tensors[f"{variant}/gradient"] = _join(gradients)
        if entropy_gradients[0] is not None:
            tensors[f"{variant}/entropy_gradient"] = _join(entropy_gradients)
        for name in metrics[0]:
            values = [of_case[name] for of_case in metrics]
            tensors[f"{variant}/metrics/{name}"] = torch.tensor(values, dtype=torch.float64)
    return tensors


def trl_advantages_of(reward_cases: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """What TRL makes of every set of rewards, under names "advantages/scale"."""
    from trl_peer import trl_advantages

    return {
        f"advantages/{scale}": _join(trl_advantages(*case, scale)[0] for case in reward_cases)
        for scale in SCALES
    }


def _join(tensors: Any) -> Tensor:
    """Ragged tensors behind one another, because a name for each would outweigh its numbers."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def write(path: Path) -> None:
    """Make the cases, ask TRL, and write both."""
    from trl_peer import VERSION

    generator = torch.Generator().manual_seed(0)
    cases = [random_case(generator) for _ in range(LOSS_CASES)]
    cases[::5] = [case._replace(old_log_probs=None) for case in cases[::5]]  # a first update
    rewards = [random_rewards(generator) for _ in range(REWARD_CASES)]
    tensors = {
        "shapes": torch.tensor([case.mask.shape for case in cases]),
        "first_update": torch.tensor([case.old_log_probs is None for case in cases]),
        "rewards": _join(rewards_of for rewards_of, _ in rewards),
        "reward_shapes": torch.tensor([(len(r) // G, G) for r, G in rewards]),
    }
    for name in Case._fields:
        values = [getattr(case, name) for case in cases]
        tensors[name] = _join(c.log_probs if v is None else v for v, c in zip(values, cases))
    tensors |= trl_losses(cases) | trl_advantages_of(rewards)
    # One entry, because safetensors writes several in an order that differs from run to run.
    versions = json.dumps({"trl": VERSION, "torch": torch.__version__})
    with atomic_path(path) as unfinished:
        unfinished.write_bytes(save(tensors, metadata={"versions": versions}))


class Answers:
    """The file, read: `cases`, `reward_cases`, `versions`, and `tensors` by name."""

    def __init__(self, path: Path = FILE) -> None:
        with safe_open(path, framework="pt") as file:
            self.versions = json.loads(file.metadata()["versions"])
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}
        self.shapes = self.tensors["shapes"].tolist()
        columns = [self.per_case(name) for name in Case._fields]
        self.cases = [
            Case(*values)._replace(**({"old_log_probs": None} if first else {}))
            for values, first in zip(zip(*columns), self.tensors["first_update"].tolist())
        ]
        groups = self.tensors["reward_shapes"].tolist()
        self.reward_sizes = [P * G for P, G in groups]
        rewards = self.tensors["rewards"].split(self.reward_sizes)
        self.reward_cases = [(r, G) for r, (_, G) in zip(rewards, groups)]

    def per_case(self, name: str) -> list[Tensor]:
        """Cut what `_join` joined: (N, T) of every case; of the advantages (N,)."""
        values = self.tensors[name]
        if name == "advantages":
            return list(values.split([N for N, _ in self.shapes]))
        parts = values.split([N * T for N, T in self.shapes])
        return [part.view(N, T) for part, (N, T) in zip(parts, self.shapes)]

    def losses(self, variant: str) -> Iterator[tuple[Tensor, Tensor, Tensor | None, dict]]:
        """TRL's answers to every case, as `trl_peer.trl_loss` gives them."""
        losses = self.tensors[f"{variant}/loss"]
        gradients = self.per_case(f"{variant}/gradient")
        entropy_gradients: list[Tensor | None] = [None] * len(losses)
        if f"{variant}/entropy_gradient" in self.tensors:
            entropy_gradients = list(self.per_case(f"{variant}/entropy_gradient"))
        start = f"{variant}/metrics/"
        names = [name for name in self.tensors if name.startswith(start)]
        metrics = [
            {name.removeprefix(start): self.tensors[name][i].item() for name in names}
            for i in range(len(losses))
        ]
        yield from zip(losses, gradients, entropy_gradients, metrics)

    def advantages(self, scale: str) -> list[Tensor]:
        """TRL's advantages of every set of rewards."""
        return list(self.tensors[f"advantages/{scale}"].split(self.reward_sizes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(FILE)
    print(f"wrote {FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE}")
