"""The smallest tests, asked of the course's own loop: every test here takes the settings of a run.

They look the loop's functions up by name when they run, so that they see a bug that is in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minigrpo import arithmetic, grpo, objective
from minigrpo.arithmetic import Arithmetic
from minigrpo.clinic import smallest_tests
from minigrpo.clinic.bugs import score
from minigrpo.grpo import GRPOConfig, StepMetrics, train_grpo
from minigrpo.llama import load_policy
from minigrpo.sampling import Rollouts


@cache
def _llama() -> nn.Module:
    return load_policy()


def _eight(config: GRPOConfig) -> Rollouts:
    prompts = torch.stack([arithmetic.prompt_ids((7, 4, 9, 5))] * 8)
    generator = torch.Generator().manual_seed(0)
    return grpo.sample(
        _llama(), prompts, max_new_tokens=16, eos_id=config.eos_id, pad_id=config.pad_id,
        temperature=config.temperature, generator=generator,
    )  # fmt: skip


def _steps(config: GRPOConfig, steps: int, **changes: Any) -> list[StepMetrics]:
    # A bug is the test's to report, not the loop's own checks'.
    config = replace(config, steps=steps, prompts_per_step=4, check=False, **changes)
    return list(train_grpo(load_policy(), Arithmetic(), config))


def _loss(config: GRPOConfig) -> Callable[..., Tensor]:
    settings = {"level": config.level, "how": config.how, "max_length": config.max_new_tokens}
    return lambda *tensors: grpo.grpo_loss(*tensors, **settings)[0]


def _with_reference(config: GRPOConfig) -> Callable[..., Tensor]:
    return lambda *tensors: grpo.grpo_loss(*tensors[:4], ref_log_probs=tensors[4], kl_weight=1.0)[0]


def _with_entropy(config: GRPOConfig) -> Callable[..., Tensor]:
    return lambda *tensors: grpo.grpo_loss(*tensors[:4], entropy=tensors[4], entropy_weight=0.1)[0]


def _kl(config: GRPOConfig) -> Callable[..., Tensor]:
    return lambda new, ref: objective.kl_estimate(new, ref, estimator=config.estimator)


def _advantages(config: GRPOConfig) -> Callable[..., Tensor]:
    return lambda *arguments: grpo.group_advantages(*arguments)


def _reward(config: GRPOConfig) -> Callable[[list[int]], float]:
    prompt = arithmetic.prompt_ids((7, 4, 9))
    return lambda completion: Arithmetic().reward([prompt], [torch.tensor(completion)])[0]


def _score(config: GRPOConfig) -> Callable[..., Tensor]:
    def log_probs(model: nn.Module, prompt: Tensor, completion: Tensor) -> Tensor:
        real = torch.ones_like(prompt, dtype=torch.bool)
        text = (prompt, real, completion, real)
        return grpo.completion_log_probs_and_entropy(model, *text)[0]

    return log_probs


def _sample(config: GRPOConfig) -> Callable[[], tuple[Rollouts, Tensor, Tensor]]:
    def sample() -> tuple[Rollouts, Tensor, Tensor]:
        rollouts = _eight(config)
        return rollouts, rollouts.log_probs, rollouts.completion_mask

    return sample


def _rescore(config: GRPOConfig) -> Callable[[Rollouts], Tensor]:
    return lambda rollouts: score(_llama(), rollouts, config.temperature)


def _rewards(config: GRPOConfig) -> Callable[[float], Tensor]:
    rollouts, config = _eight(config), replace(config, prompts_per_step=1, group_size=8)

    def rewards(factor: float) -> Tensor:
        drawn = replace(rollouts, log_probs=rollouts.log_probs * factor)
        with patch.object(grpo, "sample", lambda *_, **__: drawn):
            return grpo.rollout(_llama(), Arithmetic(), [rollouts.prompt_ids[0]], config, None)[1]

    return rewards


def _first_kl(config: GRPOConfig) -> Callable[[], float]:
    return lambda: _steps(config, 1, inner_epochs=1, kl_weight=0.01)[0].kl


def _first_ratios(config: GRPOConfig) -> Callable[[], list[Tensor]]:
    def ratios() -> list[Tensor]:
        done = _steps(config, 3, inner_epochs=1)
        return [torch.tensor([m.ratio_min, m.ratio_max]) for m in done]

    return ratios


def _first_step(config: GRPOConfig) -> Callable[[], tuple[float, Tensor, Tensor]]:
    def step() -> tuple[float, Tensor, Tensor]:
        plain = {"kl_weight": 0.0, "entropy_weight": 0.0, "how": "token_mean"}
        (first,) = _steps(config, 1, inner_epochs=1, **plain)
        return first.loss, first.advantages.cpu(), first.rollouts.completion_mask.cpu()

    return step


def weights_move(config: GRPOConfig) -> None:
    policy, config = load_policy(), replace(config, steps=5, prompts_per_step=4)
    smallest_tests.weights_move(policy, lambda: list(train_grpo(policy, Arithmetic(), config)))


def _asked(name: str, *ours: Callable[[GRPOConfig], Any]) -> Callable[[GRPOConfig], None]:
    """The smallest test of that name, with functions of ours in the places of the reader's."""
    test = getattr(smallest_tests, name)

    def ask(config: GRPOConfig) -> None:
        test(*(make(config) for make in ours))

    ask.__name__ = ask.__qualname__ = name
    return ask


# fmt: off
a_certain_text_has_log_prob_0 = _asked("a_certain_text_has_log_prob_0", _score)
a_right_answer_is_rewarded = _asked(
    "a_right_answer_is_rewarded", _reward, lambda _: arithmetic.completion_ids([], 0))
a_wrong_answer_is_not_rewarded = _asked(
    "a_wrong_answer_is_not_rewarded", _reward, lambda _: arithmetic.completion_ids([], 9))
the_ratio_has_a_gradient = _asked("the_ratio_has_a_gradient", _loss)
the_padding_gets_no_gradient = _asked("the_padding_gets_no_gradient", _loss)
a_low_ratio_of_a_bad_token_is_left_alone = _asked("a_low_ratio_of_a_bad_token_is_left_alone", _loss)
a_small_drift_of_a_long_text_keeps_its_gradient = _asked(
    "a_small_drift_of_a_long_text_keeps_its_gradient", _loss)
the_loss_depends_on_the_reference = _asked("the_loss_depends_on_the_reference", _with_reference)
the_entropy_bonus_has_a_gradient = _asked("the_entropy_bonus_has_a_gradient", _with_entropy)
the_kl_term_has_a_mean_gradient = _asked("the_kl_term_has_a_mean_gradient", _kl)
the_kl_is_0_before_the_first_update = _asked("the_kl_is_0_before_the_first_update", _first_kl)
the_ratio_is_1_at_every_first_update = _asked("the_ratio_is_1_at_every_first_update", _first_ratios)
the_loss_is_the_one_by_hand = _asked("the_loss_is_the_one_by_hand", _first_step)
sampler_and_scorer_agree = _asked("sampler_and_scorer_agree", _sample, _rescore)
completions_end = _asked("completions_end", _sample)
rewards_do_not_ask_the_policy = _asked("rewards_do_not_ask_the_policy", _rewards)
luck_of_the_prompt_is_no_advantage = _asked("luck_of_the_prompt_is_no_advantage", _advantages)
equal_rewards_give_no_advantage = _asked("equal_rewards_give_no_advantage", _advantages)
prompts_end_in_the_last_column = _asked(
    "prompts_end_in_the_last_column",
    lambda config: lambda prompts: grpo.left_pad(prompts, config.pad_id)[0])
# fmt: on
