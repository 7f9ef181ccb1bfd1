"""The word problems on TRL's trainer. TRL needs the extra `scale`.

The settings of `train_grpo` are translated, the task and the reward functions are the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minigrpo.grpo import GRPOConfig
from minigrpo.sampling import Rollouts, stop_ids
from minigrpo.text.problems import draw_rows
from minigrpo.text.prompts import TextProblems, answer_reward, format_reward, stop_tokens

if TYPE_CHECKING:
    from trl import GRPOTrainer

REWARD_FUNCTIONS = (format_reward, answer_reward)
WEIGHTS = (1.0, 2.0)
"""1 for the form, 2 for the right answer: 3 is the most."""
LOSS_TYPES = {"sequence_mean": "grpo", "token_mean": "dapo", "constant": "dr_grpo"}
"""From `how` to TRL's loss_type."""
LEVELS = {"token": "token", "geometric": "sequence"}
"""From `level` to TRL's importance_sampling_level; it has no plain product."""


def require_trl() -> None:
    """Say how TRL is installed, where it is not.

    Raises:
        ImportError: it is not.
    """
    if find_spec("trl") is None:
        raise ImportError(
            "TRL is not installed. It comes with the extra `scale`, for Python 3.11 and newer: "
            "make course SCALE=1, or pip install -e '.[scale]' in the folder of the course"
        )


# --------------------------------------------------------------------------------------------
# the same task, for both


def problem_config(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> GRPOConfig:
    """Settings for the word problems: 16 prompts, 8 completions each, two passes over them.

    Args:
        policy, tokenizer: which tokens end a completion, and which fills the rows.
        settings: others of `GRPOConfig`.
    """
    usual = {
        "prompts_per_step": 16,
        "group_size": 8,
        "max_new_tokens": 40,
        "eos_id": stop_tokens(tokenizer, policy),
        "pad_id": tokenizer.pad_token_id,
        "lr": 3e-4,
        "inner_epochs": 2,
        "how": "token_mean",
    }
    return GRPOConfig(**{**usual, **settings})


def problem_rows() -> list[dict[str, str]]:
    """2,000 word problems to train on."""
    return draw_rows(2000, torch.Generator().manual_seed(1))


def problem_task(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, str]], config: GRPOConfig
) -> TextProblems:
    """These rows as the task of `train_grpo`."""
    return TextProblems(tokenizer, rows, REWARD_FUNCTIONS, WEIGHTS, config.eos_id)


# --------------------------------------------------------------------------------------------
# TRL


def trl_settings(config: GRPOConfig, processes: int = 1) -> dict[str, Any]:
    """The settings of TRL's GRPOConfig that mean the same.

    Args:
        config: ours, for all processes together.
        processes: how many share the rows of a batch; TRL wants the rows of one.

    Raises:
        ValueError: a setting that its GRPOTrainer does not have, or has in another way.
    """
    only = {
        "baseline": ("mean",),
        "eps": (1e-4,),
        "level": tuple(LEVELS),
        "estimator": ("k3",),
        "minibatch_size": (None,),
        "skip_equal_groups": (False,),
        "split_invariant": (False,),
        "warmup_steps": (0,),  # TRL's rises with each update, and from 0
    }
    for name, values in only.items():
        if getattr(config, name) not in values:
            expected = " or ".join(map(repr, values))
            raise ValueError(
                f"{name}: expected {expected} for TRL's GRPOTrainer, got {getattr(config, name)!r}"
            )
    cispo = config.surrogate == "cispo"
    if cispo and config.how != "token_mean":
        raise ValueError(
            f"how: expected 'token_mean' with cispo for TRL's GRPOTrainer, got {config.how!r}"
        )
    rows = config.prompts_per_step * config.group_size
    if rows % processes:
        raise ValueError(f"processes: expected a divisor of {rows}, the rows, got {processes}")
    return {
        "max_steps": config.steps * config.inner_epochs,  # TRL counts updates
        "per_device_train_batch_size": rows // processes,
        "num_generations": config.group_size,
        "max_completion_length": config.max_new_tokens,
        "temperature": config.temperature,
        "num_iterations": config.inner_epochs,
        "scale_rewards": config.scale,
        "importance_sampling_level": LEVELS[config.level],
        "loss_type": "cispo" if cispo else LOSS_TYPES[config.how],
        "epsilon": config.clip[0],
        # Of cispo TRL wants the cap itself: 1.2, where all others say 0.2.
        "epsilon_high": 1 + config.clip[1] if cispo else config.clip[1],
        "beta": config.kl_weight,
        "use_bias_correction_kl": config.kl_correction,
        "entropy_coef": config.entropy_weight,
        "learning_rate": config.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "max_grad_norm": config.max_grad_norm,
        "seed": config.seed,
        "reward_weights": list(WEIGHTS),
    }


QUIET = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}
"""Settings of TRL for a small model on a CPU; it writes no files."""


def trl_trainer(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, str]],
    config: GRPOConfig,
    **settings: Any,
) -> GRPOTrainer:
    """TRL's trainer for rows and reward functions that `train_grpo` takes too.

    Args:
        policy: trained in place.
        tokenizer: its own.
        rows: each with a "prompt" and the columns of the reward functions.
        config: ours, translated by `trl_settings`.
        settings: further ones, by TRL's names; they win.

    Raises:
        ImportError: TRL is not installed.
        ValueError: see `trl_settings`; a config with other stop or pad tokens than TRL will use.
    """
    require_trl()
    stops = stop_tokens(tokenizer, policy)
    if set(stop_ids(config.eos_id)) != set(stops):
        raise ValueError(f"eos_id: expected {stops}, where TRL stops, got {config.eos_id}")
    if config.pad_id != tokenizer.pad_token_id:
        raise ValueError(
            f"pad_id: expected {tokenizer.pad_token_id}, the tokenizer's, got {config.pad_id}"
        )
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers.trainer_callback import PrinterCallback

    disable_progress_bars()
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    args = {**QUIET, **trl_settings(config, processes), **settings}
    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=list(REWARD_FUNCTIONS),
        # It asks for a folder, and with these settings leaves it empty.
        args=trl.GRPOConfig(output_dir=tempfile.gettempdir(), **args),
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trl_rewards(trainer: GRPOTrainer) -> list[float]:
    """Train with TRL; returns the mean reward of each batch of rollouts.

    TRL has a line of log for each update; the reward stands in the first one of a batch.
    """
    trainer.train()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def trl_loss(
    trainer: GRPOTrainer,
    rollouts: Rollouts,
    advantages: Tensor,
    ref_log_probs: Tensor | None = None,
    *,
    on_policy: bool = False,
) -> Tensor:
    """The loss of TRL's own `GRPOTrainer._compute_loss`, from tokens, with its gradient.

    Args:
        trainer: with the policy that is scored.
        rollouts: N completions.
        advantages: (N,).
        ref_log_probs: (N, T), if the trainer's beta is not 0.
        on_policy: leave the log-probs of the sampler out; TRL then takes the policy's own.
    """
    inputs = {
        "prompt_ids": rollouts.prompt_ids,
        "prompt_mask": rollouts.prompt_mask.long(),
        "completion_ids": rollouts.completions,
        "completion_mask": rollouts.completion_mask.long(),
        "advantages": advantages,
        "num_items_in_batch": rollouts.completion_mask.sum(),
        "ref_per_token_logps": ref_log_probs,
    }
    if not on_policy:
        inputs["old_per_token_logps"] = rollouts.log_probs
    trainer.current_gradient_accumulation_steps = 1  # all rows in one update
    trainer.model.train()
    return trainer._compute_loss(trainer.model, inputs)
