"""The word problems on TRL's trainer: settings translated, task and rewards the same."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.clinic.judge.trl_answers import LEVELS, LOSS_TYPES, in_trls_words
from minigrpo.grpo import GRPOConfig
from minigrpo.sampling import Rollouts, stop_ids
from minigrpo.text.problems import draw_rows
from minigrpo.text.prompts import answer_reward, format_reward, stop_tokens

if TYPE_CHECKING:
    from trl import GRPOTrainer

REWARD_FUNCTIONS, WEIGHTS = (format_reward, answer_reward), (1.0, 2.0)  # 3 is the most


def require_trl() -> None:
    """Say how TRL is installed, by an ImportError, where it is not."""
    if find_spec("trl") is None:
        raise ImportError(
            "TRL is not installed. It comes with the extra `scale`, for Python 3.11 and newer: "
            "make course SCALE=1, or pip install -e '.[scale]' in the folder of the course"
        )


def problem_config(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> GRPOConfig:
    """Settings for the word problems: 16 prompts, 8 completions each, two passes; or others."""
    usual = dict(prompts_per_step=16, group_size=8, max_new_tokens=40, lr=3e-4, inner_epochs=2)
    usual |= dict(eos_id=stop_tokens(tokenizer, policy), pad_id=tokenizer.pad_token_id)
    return GRPOConfig(**{**usual, "how": "token_mean", **settings})


def problem_rows() -> list[dict[str, str]]:
    """2,000 word problems to train on."""
    return draw_rows(2000, torch.Generator().manual_seed(1))


def trl_settings(
    config: GRPOConfig,  # for all processes together
    processes: int = 1,  # that share the rows of a batch; TRL wants the rows of one
) -> dict[str, Any]:
    """The settings of TRL's GRPOConfig that mean the same; ValueError where none does."""
    known = [how for surrogate, how, _ in LOSS_TYPES.values() if surrogate == config.surrogate]
    only = {"baseline": ("mean",), "level": tuple(LEVELS.values()), "estimator": ("k3",)}
    only |= {"call_id": (None,), "how": tuple(dict.fromkeys(known))}
    for name, values in only.items():
        if (value := getattr(config, name)) not in values:
            expected = " or ".join(map(repr, values)) + (" with cispo" if name == "how" else "")
            raise ValueError(f"{name}: expected {expected} for TRL's GRPOTrainer, got {value!r}")
    rows = config.prompts_per_step * config.group_size
    if rows % processes:
        raise ValueError(f"processes: expected a divisor of {rows}, the rows, got {processes}")
    return {
        "max_steps": config.steps * config.inner_epochs,  # TRL counts updates
        "per_device_train_batch_size": rows // processes, "num_generations": config.group_size,
        "temperature": config.temperature,
        "num_iterations": config.inner_epochs, "scale_rewards": config.scale,
        **in_trls_words(
            level=config.level, clip=config.clip, surrogate=config.surrogate, how=config.how,
            max_length=config.max_new_tokens, kl_weight=config.kl_weight,
            kl_correction=config.kl_correction, entropy_weight=config.entropy_weight,
        ),
        "learning_rate": config.lr, "lr_scheduler_type": "constant",
        "adam_beta1": config.betas[0], "adam_beta2": config.betas[1],
        "max_grad_norm": config.max_grad_norm, "seed": config.seed, "reward_weights": list(WEIGHTS),
    }  # fmt: skip


QUIET = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
    "dataloader_pin_memory": False, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
}  # fmt: skip
"""Settings of TRL for a small model on a CPU; it writes no files."""


def trl_trainer(
    policy: PreTrainedModel,  # trained in place
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, str]],  # each a "prompt" and the columns of the reward functions
    config: GRPOConfig,  # ours, translated by `trl_settings`
    **settings: Any,  # further ones, by TRL's names; they win
) -> GRPOTrainer:
    """TRL's trainer for rows and reward functions that `train_grpo` takes too."""
    require_trl()
    stops = stop_tokens(tokenizer, policy)
    if set(stop_ids(config.eos_id)) != set(stops):
        raise ValueError(f"eos_id: expected {stops}, where TRL stops, got {config.eos_id}")
    if config.pad_id != (pad := tokenizer.pad_token_id):
        raise ValueError(f"pad_id: expected {pad}, the tokenizer's, got {config.pad_id}")
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers.trainer_callback import PrinterCallback

    disable_progress_bars()
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    args = {**QUIET, **trl_settings(config, processes), **settings}
    trainer = trl.GRPOTrainer(
        policy,
        list(REWARD_FUNCTIONS),
        trl.GRPOConfig(output_dir=tempfile.gettempdir(), **args),  # which it leaves empty
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trl_rewards(trainer: GRPOTrainer) -> list[float]:
    """Train with TRL; returns the mean reward of each batch, from its first line of log."""
    trainer.train()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def trl_loss(
    trainer: GRPOTrainer,  # with the policy that is scored
    rollouts: Rollouts,  # N completions
    advantages: Tensor,  # (N,)
    ref_log_probs: Tensor | None = None,  # (N, T), if the trainer's beta is not 0
    *,
    on_policy: bool = False,  # take the policy's own log-probs for those of the sampler
) -> Tensor:
    """The loss of TRL's own `GRPOTrainer._compute_loss`, from tokens, with its gradient."""
    r = rollouts
    inputs = {
        "prompt_ids": r.prompt_ids, "prompt_mask": r.prompt_mask.long(),
        "completion_ids": r.completions, "completion_mask": r.completion_mask.long(),
        "tool_mask": r.own.long(), "num_items_in_batch": r.own.sum(),
        "advantages": advantages, "ref_per_token_logps": ref_log_probs,
    }  # fmt: skip
    if not on_policy:
        inputs["old_per_token_logps"] = r.log_probs
    trainer.current_gradient_accumulation_steps = 1  # all rows in one update
    trainer.model.train()
    return trainer._compute_loss(trainer.model, inputs)
