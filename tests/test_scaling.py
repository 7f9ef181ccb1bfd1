"""The bridge to TRL and to several processes: settings, messages, the command."""

import inspect
from dataclasses import asdict

import pytest

from minigrpo.clinic.judge.trl_answers import WORDS, translated
from minigrpo.files import data_folder
from minigrpo.grpo import GRPOConfig
from minigrpo.scaling import trl as scaling
from minigrpo.text.models import load_pretrained

needs_trl = pytest.mark.skipif(
    scaling.find_spec("trl") is None, reason="the extra `scale` is not installed"
)


@pytest.fixture(scope="module")
def text_policy():
    return load_pretrained(data_folder() / "text_llama", device="cpu")


def test_settings_by_hand():
    config = GRPOConfig(
        steps=5, prompts_per_step=6, group_size=4, inner_epochs=3, max_new_tokens=7, lr=0.5,
        temperature=0.8, scale="batch", level="geometric", how="constant", clip=(0.1, 0.3),
        kl_weight=0.04, kl_correction=True, entropy_weight=0.02, betas=(0.6, 0.7),
        max_grad_norm=2.0, seed=9,
    )  # fmt: skip
    assert scaling.trl_settings(config, processes=2) == {
        "max_steps": 15, "per_device_train_batch_size": 12, "num_generations": 4,
        "num_iterations": 3, "max_completion_length": 7, "learning_rate": 0.5,
        "lr_scheduler_type": "constant", "temperature": 0.8, "scale_rewards": "batch",
        "importance_sampling_level": "sequence", "loss_type": "dr_grpo", "epsilon": 0.1,
        "epsilon_high": 0.3, "beta": 0.04, "use_bias_correction_kl": True, "entropy_coef": 0.02,
        "adam_beta1": 0.6, "adam_beta2": 0.7, "max_grad_norm": 2.0, "seed": 9,
        "reward_weights": [1.0, 2.0],
    }  # fmt: skip
    assert scaling.trl_settings(GRPOConfig())["use_bias_correction_kl"] is False  # TRL's is True


@pytest.mark.parametrize(
    "change",
    [
        *({"how": how, "max_new_tokens": 9} for how in ("sequence_mean", "token_mean", "constant")),
        {"level": "geometric", "how": "sequence_mean", "clip": (0.05, 0.1), "kl_weight": 0.1},
        {"surrogate": "cispo", "how": "token_mean", "kl_weight": 0.1, "kl_correction": True},
    ],
    ids=str,
)
def test_the_loss_has_the_words_of_trl_that_are_compared_with_it(change):
    """By test_objective_trl.py; that both stacks agree from the tokens on, notebook 10 shows."""
    config = GRPOConfig(**change, entropy_weight=0.02)
    words = {"loss_type", "importance_sampling_level", "epsilon", "epsilon_high", *WORDS}
    told = {name: x for name, x in scaling.trl_settings(config).items() if name in words}
    for name, value in translated(**told).items():
        ours = getattr(config, {"max_length": "max_new_tokens"}.get(name, name))
        assert value == pytest.approx(ours), name


@pytest.mark.parametrize(
    "change",
    [
        {"baseline": "leave_one_out"},
        {"level": "sequence"},
        {"estimator": "k1"},
        {"call_id": 3},
        {"surrogate": "cispo", "how": "constant"},
    ],
    ids=str,
)
def test_what_trl_does_not_have_is_an_error(change):
    with pytest.raises(ValueError, match=f"{list(change)[-1]}: expected .* TRL"):
        scaling.trl_settings(GRPOConfig(**change))


def test_rows_that_cannot_be_shared():
    with pytest.raises(ValueError, match="processes: expected a divisor of 12, the rows, got 5"):
        scaling.trl_settings(GRPOConfig(prompts_per_step=3, group_size=4), processes=5)


def test_every_setting_is_translated_or_refused():
    """A new setting of ours must not be dropped in silence."""
    own = {"steps", "prompts_per_step", "eos_id", "pad_id", "evaluate_every", "check"}
    own |= {"rows_per_pass"}  # changes the memory alone
    source = inspect.getsource(scaling.trl_settings)
    missing = [
        name
        for name in asdict(GRPOConfig())
        if f"config.{name}" not in source and f'"{name}"' not in source and name not in own
    ]
    assert missing == []


@needs_trl
def test_trl_gets_what_was_asked_for(text_policy, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    policy, tokenizer = text_policy
    config = scaling.problem_config(policy, tokenizer, steps=3, clip=(0.1, 0.3), seed=7)
    rows, other = scaling.problem_rows()[:16], {"learning_rate": 0.7}
    trainer = scaling.trl_trainer(policy, tokenizer, rows, config, **other)
    assert trainer.args.learning_rate == 0.7 != config.lr
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.1, 0.3)
    assert trainer.args.max_steps == 6 and trainer.args.seed == 7
    assert trainer.beta == 0 and trainer.ref_model is None
    assert trainer.reward_weights.tolist() == [1.0, 2.0]
    assert trainer.reward_func_names == ["format_reward", "answer_reward"]


@needs_trl
def test_rows_are_shared_by_the_processes_that_torchrun_starts(text_policy, monkeypatch):
    def settings(config, processes):
        raise KeyError(f"{processes} processes")

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(scaling, "trl_settings", settings)
    with pytest.raises(KeyError, match="4 processes"):
        scaling.trl_trainer(*text_policy, [], scaling.problem_config(*text_policy))


@needs_trl
@pytest.mark.parametrize(
    ("change", "message"),
    [({"eos_id": 5}, "eos_id: expected"), ({"pad_id": 9}, "pad_id: expected")],
)
def test_tokens_that_trl_would_not_use_are_an_error(text_policy, change, message):
    policy, tokenizer = text_policy
    config = scaling.problem_config(policy, tokenizer, **change)
    with pytest.raises(ValueError, match=message):
        scaling.trl_trainer(policy, tokenizer, scaling.problem_rows()[:16], config)


def test_without_trl_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(scaling, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="make course SCALE=1"):
        scaling.require_trl()
    with pytest.raises(ImportError, match="make course SCALE=1"):
        scaling.trl_trainer(None, None, [], GRPOConfig())
