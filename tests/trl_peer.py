"""What TRL computes: its own GRPOTrainer, asked without a model.

Only what would need a model is replaced: the forward pass hands over given log-probs and
entropies, sampling and scoring hand over given completions and rewards. Everything between is
TRL's code as installed, in float64. Import this module only where TRL is installed.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

if not trl.__version__.startswith("1.16."):
    raise RuntimeError(
        "trl: expected version 1.16, the one that minigrpo.objective follows, got "
        f"{trl.__version__}; install it with: pip install -e '.[scale]'"
    )

VERSION = trl.__version__

ACCELERATOR = SimpleNamespace(  # one process
    device=torch.device("cpu"),
    num_processes=1,
    process_index=0,
    sync_gradients=True,
    gather=lambda values: values,
    reduce=lambda values, reduction: values,
)


@cache
def _defaults() -> dict[str, Any]:
    """TRL's defaults, without a GRPOConfig, which would look for devices and folders."""
    fields = dataclasses.fields(GRPOConfig)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def _trainer(**settings: Any) -> GRPOTrainer:
    """A GRPOTrainer in training mode that holds settings and nothing else."""
    unknown = settings.keys() - _defaults().keys()
    if unknown:
        raise TypeError(f"GRPOConfig has no {', '.join(sorted(unknown))}")
    args = SimpleNamespace(**{**_defaults(), **settings})
    args.steps_per_generation = args.gradient_accumulation_steps = 1  # all rows in one update
    args.pad_to_multiple_of = None  # what GRPOConfig makes of its default, "auto"
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.args = args
    trainer.accelerator = ACCELERATOR
    trainer.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer._metrics = {"train": defaultdict(list)}
    # What __init__ copies from its arguments.
    names = """beta entropy_coef importance_sampling_level loss_type mask_truncated_completions
        max_completion_length multi_objective_aggregation num_generations num_iterations
        off_policy_mask_threshold pad_to_multiple_of scale_rewards top_entropy_quantile
        use_adaptive_entropy use_vllm vllm_importance_sampling_correction"""
    for name in names.split():
        setattr(trainer, name, getattr(args, name))
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer._entropy_bonus_enabled = args.entropy_coef != 0.0 or args.use_adaptive_entropy
    trainer.aux_loss_enabled = False
    return trainer


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """TRL divides whole numbers, G / (G - 1), whose quotient is rounded to the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compute(case: Any, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """The answer of `GRPOTrainer._compute_loss`: the loss, with its graph, and TRL's metrics.

    The case has log_probs, old_log_probs (or None), ref_log_probs, entropy and mask, (N, T), and
    advantages (N,); the settings are GRPOConfig's.
    """
    trainer, scored = _trainer(**settings), (case.log_probs, case.entropy, None)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: scored
    ids = torch.zeros_like(case.mask)  # nobody reads them
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": case.mask,
        "advantages": case.advantages,
        "num_items_in_batch": case.mask.sum(),
        "ref_per_token_logps": case.ref_log_probs,
    }
    if case.old_log_probs is not None:
        inputs["old_per_token_logps"] = case.old_log_probs
    loss = trainer._compute_loss(None, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def trl_loss(case: Any, **settings: Any) -> tuple[Tensor, Tensor, Tensor | None, dict[str, float]]:
    """The same with the gradients of log_probs and of entropy (None: it doesn't depend on it)."""
    leaves = [x.detach().clone().requires_grad_() for x in (case.log_probs, case.entropy)]
    loss, metrics = compute(case._replace(log_probs=leaves[0], entropy=leaves[1]), **settings)
    return loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True), metrics


def trl_advantages(rewards: Tensor, group_size: int, scale: str) -> tuple[Tensor, dict[str, float]]:
    """The advantages of `GRPOTrainer._generate_and_score_completions`, and TRL's metrics.

    rewards (N,), prompt-major; scale is TRL's scale_rewards. All is computed in the dtype of the
    rewards, which in training is float32.
    """
    trainer = _trainer(scale_rewards=scale, num_generations=group_size)
    N = len(rewards)
    token = [[1] for _ in range(N)]
    trainer._generate = lambda prompts: (token, token, None, [""] * N, None, {}, None, None)
    trainer._calculate_rewards = lambda *_: rewards[:, None].clone()
    trainer.reward_weights = torch.ones(1, dtype=rewards.dtype)
    trainer.reward_func_names = ["reward"]
    trainer.environment_factories = trainer.environments = trainer.tools = None
    trainer._tokenizer = SimpleNamespace(pad_token_id=0)
    trainer._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    with _default_dtype(rewards.dtype):
        output = trainer._generate_and_score_completions([{"prompt": ""} for _ in range(N)])
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return output["advantages"], metrics
