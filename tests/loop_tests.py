"""The smallest tests, asked of the course's own loop under the settings of a run.

They look the loop's functions up by name when they run, so that they see a bug that is in place.
"""

from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minigrpo import grpo, objective
from minigrpo.arithmetic import Arithmetic, completion_ids, prompt_ids
from minigrpo.clinic import smallest_tests
from minigrpo.clinic.bugs import score
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.llama import load_policy
from minigrpo.sampling import Rollouts


@dataclass(frozen=True)
class Loop:
    """The course's loop, in the form in which the smallest tests ask for a reader's functions."""

    config: GRPOConfig
    policy: nn.Module = field(default_factory=load_policy)
    right, wrong = completion_ids([], 0), completion_ids([], 9)  # answers to 7 + 4 + 9 modulo 10

    def loss(self, *tensors: Tensor, **options: Any) -> Tensor:
        c = self.config
        settings = {"level": c.level, "how": c.how, "max_length": c.max_new_tokens, **options}
        return grpo.grpo_loss(*tensors, **settings)[0]

    def loss_with_kl(self, *tensors: Tensor) -> Tensor:
        return self.loss(*tensors[:4], ref_log_probs=tensors[4], kl_weight=1.0)

    def loss_with_entropy(self, *tensors: Tensor) -> Tensor:
        return self.loss(*tensors[:4], entropy=tensors[4], entropy_weight=0.1)

    def kl(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        return objective.kl_estimate(log_probs, ref_log_probs, estimator=self.config.estimator)

    def advantages(self, rewards: Tensor, group_size: int) -> Tensor:
        return grpo.group_advantages(rewards, group_size)

    def pad(self, prompts: list[Tensor]) -> Tensor:
        return grpo.left_pad(prompts, self.config.pad_id)[0]

    def reward(self, completion: list[int]) -> float:
        return Arithmetic().reward([prompt_ids((7, 4, 9))], [torch.tensor(completion)])[0]

    def score(self, model: nn.Module, prompt: Tensor, completion: Tensor) -> Tensor:
        real = torch.ones_like(prompt, dtype=torch.bool)
        return score(model, Rollouts(prompt, real, completion, real, real))

    def eight(self) -> Rollouts:
        c, prompts = self.config, torch.stack([prompt_ids((7, 4, 9, 5))] * 8)
        settings = {"eos_id": c.eos_id, "pad_id": c.pad_id, "temperature": c.temperature}
        generator = torch.Generator().manual_seed(0)
        return grpo.sample(self.policy, prompts, max_new_tokens=16, generator=generator, **settings)

    def sample(self) -> tuple[Rollouts, Tensor, Tensor]:
        rollouts = self.eight()
        return rollouts, rollouts.log_probs, rollouts.completion_mask

    def rescore(self, rollouts: Rollouts) -> Tensor:
        return score(self.policy, rollouts, self.config.temperature)

    def rewards(self, factor: float) -> Tensor:
        """Of the same completions, whatever the sampler says of their log-probs."""
        rollouts, config = self.eight(), replace(self.config, prompts_per_step=1, group_size=8)
        drawn = replace(rollouts, log_probs=rollouts.log_probs * factor)
        with patch.object(grpo, "sample", lambda *_, **__: drawn):
            prompts = [rollouts.prompt_ids[0]]
            return grpo.rollout(self.policy, Arithmetic(), prompts, config, None)[1]

    def steps(self, steps: int, **changes: Any) -> list[StepMetrics]:
        # A bug is the test's to report, not the loop's own checks'.
        changes |= {"steps": steps, "prompts_per_step": 4, "inner_epochs": 1, "check": False}
        return list(train_grpo(load_policy(), Arithmetic(), replace(self.config, **changes)))

    def first_kl(self) -> float:
        return self.steps(1, kl_weight=0.01)[0].kl

    def first_ratios(self) -> list[Tensor]:
        return [torch.tensor([m.ratio_min, m.ratio_max]) for m in self.steps(3)]

    def first_step(self) -> tuple[float, Tensor, Tensor]:
        (m,) = self.steps(1, kl_weight=0.0, entropy_weight=0.0, how="token_mean")
        return m.loss, m.advantages.cpu(), m.rollouts.completion_mask.cpu()

    def train(self) -> None:
        config = replace(self.config, steps=5, prompts_per_step=4)
        list(train_grpo(self.policy, Arithmetic(), config))


def ask(test: str, *names: str, config: GRPOConfig) -> None:
    """A smallest test, with what a Loop has by these names in place of what is the reader's."""
    loop = Loop(config)
    getattr(smallest_tests, test)(*(getattr(loop, name) for name in names))
