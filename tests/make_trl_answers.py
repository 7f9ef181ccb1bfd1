"""Write down what TRL answers, for those who do not have it installed.

    python tests/make_trl_answers.py

Needs TRL (pip install -e '.[scale]'). Writes data/trl_answers.safetensors: the cases
themselves, not the seed that made them, and for each of them the answers of TRL's GRPOTrainer in
float64. The same versions of TRL and torch write the same bytes.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from minigrpo.clinic.judge.trl_answers import FILE, SCALES, VARIANTS, Case
from minigrpo.files import atomic_path

LOSS_CASES, REWARD_CASES = 40, 10
# random cases --------------------------------------------------------------------------------


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(FILE)
    print(f"wrote {FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE}")
