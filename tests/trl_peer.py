"""What TRL computes: its own GRPOTrainer, asked without a model.

Only what would need a model is replaced: the forward pass hands over given log-probs and
entropies, sampling and scoring hand over given completions and rewards. Everything between is
TRL's code as installed, in float64. Import this module only where TRL is installed.
"""

from typing import Any

import torch
import trl
from torch import Tensor
from trl import GRPOTrainer

from minigrpo.clinic.judge.adapters import trl_advantages as ask_for_advantages
from minigrpo.clinic.judge.adapters import trl_loss as ask
from minigrpo.clinic.judge.adapters import trl_trainer

if not trl.__version__.startswith("1.16."):
    raise RuntimeError(
        "trl: expected version 1.16, the one that minigrpo.objective follows, got "
        f"{trl.__version__}; install it with: pip install -e '.[scale]'"
    )

VERSION = trl.__version__


def trl_loss(case: Any, **settings: Any) -> tuple[Tensor, Tensor, Tensor | None, dict[str, float]]:
    """The answer of `GRPOTrainer._compute_loss`, and TRL's metrics.

    Between them the gradients of log_probs and of entropy (None: it doesn't depend on it). The case
    has log_probs, old_log_probs (or None), ref_log_probs, entropy and mask, (N, T), and advantages
    (N,); the settings are GRPOConfig's.
    """
    trainer = trl_trainer(GRPOTrainer, **settings)
    leaves = [x.detach().clone().requires_grad_() for x in (case.log_probs, case.entropy)]
    given = {"old_per_token_logps": case.old_log_probs, "ref_per_token_logps": case.ref_log_probs}
    loss = ask(trainer, leaves[0], case.mask, leaves[1], advantages=case.advantages, **given)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True), metrics


def trl_advantages(rewards: Tensor, group_size: int, scale: str) -> tuple[Tensor, dict[str, float]]:
    """The advantages of `GRPOTrainer._generate_and_score_completions`, and TRL's metrics.

    rewards (N,), prompt-major; scale is TRL's scale_rewards. All is computed in the dtype of the
    rewards, which in training is float32.
    """
    trainer = trl_trainer(GRPOTrainer, scale_rewards=scale, num_generations=group_size)
    advantages = ask_for_advantages(trainer, rewards)
    return advantages, {k: values[-1] for k, values in trainer._metrics["train"].items()}
