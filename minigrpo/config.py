"""What a run of GRPO is given: a task that is to be learned, and the settings of the training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minigrpo.checks import check_counts, check_sampling
from minigrpo.objective import group_advantages, grpo_loss
from minigrpo.sampling import StopIds, stop_ids


class Task(Protocol):
    """What is to be learned. Everything random comes from the generator.

    With a `call_id` it has a tool, `reply(prompt, completion) -> ids`, where the completion ends
    with the call, and `reward` gets a third list: by token, whether the policy wrote it itself.
    """

    def prompts(self, n: int, generator: torch.Generator) -> Sequence[Tensor]: ...  # n rows of ids

    # One number for each of the N completions; both are lists of N rows of ids, without padding.
    def reward(self, prompts: list[Tensor], completions: list[Tensor]) -> Sequence[float]: ...


@dataclass(frozen=True)
class GRPOConfig:
    """How to train; `GRPOConfig(**VARIANTS["dapo"], steps=50)` is a published algorithm."""

    steps: int = 100  # batches of rollouts
    prompts_per_step: int = 4  # P, different questions per batch
    group_size: int = 16  # G, completions per prompt
    max_new_tokens: int = 24  # tokens that a completion may have, a tool's included
    temperature: float = 1.0  # of sampling and of scoring, which must not differ
    eos_id: StopIds = None  # what ends a completion; None = all run to max_new_tokens
    call_id: StopIds = None  # what calls the task's tool; None = it has none
    pad_id: int = 0  # fills the shorter rows of a batch
    scale: str = "group"  # this and the next: see `group_advantages`
    baseline: str = "mean"
    level: str = "token"  # this and the next seven: see `grpo_loss`; max_length is max_new_tokens
    clip: tuple[float, float] = (0.2, 0.2)
    surrogate: str = "clip"
    how: str = "sequence_mean"
    kl_weight: float = 0.0
    estimator: str = "k3"
    kl_correction: bool = False
    entropy_weight: float = 0.0
    lr: float = 1e-4  # learning rate of AdamW, constant
    betas: tuple[float, float] = (0.9, 0.99)  # decay rates of its two averages
    max_grad_norm: float = 1.0  # the gradient is cut down to this norm
    inner_epochs: int = 1  # K, updates on the same rollouts; from the second on the ratio moves
    rows_per_pass: int = 2**30  # rows scored at a time; the gradients of the passes add up
    seed: int = 0  # of prompts and sampling
    evaluate_every: int = 10  # steps between evaluations (always one after the last)
    check: bool = True  # stop if the ratio is not 1 at a first update, or if no completion ends

    def __post_init__(self) -> None:
        counts = ("steps", "prompts_per_step", "max_new_tokens", "inner_epochs", "rows_per_pass")
        check_counts(**self._only(*counts, "evaluate_every"))
        check_counts(2, group_size=self.group_size)
        for name, value in self._only("lr", "max_grad_norm").items():
            if not value > 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        check_sampling(self.temperature, None, None)
        stop_ids(self.eos_id)
        stop_ids(self.call_id, "call_id")
        # On zeros, so that what these two refuse fails now, not after the first batch.
        zeros = torch.zeros(2, 1)
        group_advantages(torch.zeros(2 * self.group_size), **self.advantage_settings)
        terms = {"ref_log_probs": zeros, "entropy": zeros, **self.loss_settings}
        grpo_loss(zeros, None, zeros[:, 0], zeros, **terms)

    @property
    def sampling_settings(self) -> dict[str, Any]:  # keyword arguments of `sample`
        return self._only("max_new_tokens", "temperature", "eos_id", "call_id", "pad_id")

    @property
    def advantage_settings(self) -> dict[str, Any]:  # of `group_advantages`
        return self._only("group_size", "scale", "baseline")

    @property
    def loss_settings(self) -> dict[str, Any]:  # of `grpo_loss`
        names = ("level", "clip", "surrogate", "how", "kl_weight", "estimator", "kl_correction")
        return self._only(*names, "entropy_weight") | {"max_length": self.max_new_tokens}

    def _only(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}
