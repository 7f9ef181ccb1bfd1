"""Losses of other libraries, ready for the judge: `grpo-judge --from trl loss_type=dapo beta=0.04`.

Each adapter asks the installed library's own code, without a model, and takes the library's own
settings. The clip, the weight of the KL and the constant of Dr. GRPO are varied, whatever is given.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from inspect import Parameter, Signature, getmodule, getsource, isclass, signature
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minigrpo.clinic.judge.asking import first
from minigrpo.clinic.judge.probes import KINDS
from minigrpo.clinic.judge.report import Unjudged
from minigrpo.clinic.judge.trl_answers import WORDS

CLIP = {"clip": (0.2, 0.2)}
KL = {"ref_log_probs": Parameter.empty, "kl_weight": 0.0}
WHOLE = {"batch_num_tokens": None}, {"global_batch_size": None}
ENTROPY = {"entropy": Parameter.empty, "entropy_weight": 0.0}
ITEMS = "num_items_in_batch"
ACCELERATOR = SimpleNamespace(  # TRL's, of one process
    device=torch.device("cpu"), num_processes=1, process_index=0, is_main_process=True,
    sync_gradients=True, gather=lambda values: values, reduce=lambda values, reduction: values,
)  # fmt: skip


def ready(library: str, *words: str, load: Callable, settings: Callable) -> Callable:
    """What --from names: the library's own loss, its "advantages", or somebody's file.py:name."""
    if library not in LIBRARIES:
        raise Unjudged(f"--from: expected one of {', '.join(LIBRARIES)}, got {library!r}")
    if find_spec(library) is None:
        raise Unjudged(f"{library} isn't installed here (pip install {library.replace('_', '-')})")
    chosen = settings([word for word in words if "=" in word])
    own = [word if word == "advantages" else load(word) for word in words if "=" not in word]
    if own == ["advantages"] and library not in ("trl", "verl"):
        raise Unjudged(f"{library} has no function of its own that makes advantages")
    try:
        return LIBRARIES[library](*own, **chosen)
    except Unjudged:
        raise
    except Exception as error:  # it can't be imported, or it refuses a setting
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise Unjudged(f"{library} can't be asked: {why}") from None


def asked(call: Callable, kind: str, **options: Any) -> Callable:
    """The call, with the signature that the judge reads."""
    names = dict.fromkeys(KINDS[kind], Parameter.empty) | options
    usual = {k: v for k, v in options.items() if v is not Parameter.empty}

    def ask(**given: Any) -> Any:
        return call(**usual | given)

    parameters = (Parameter(k, Parameter.KEYWORD_ONLY, default=v) for k, v in names.items())
    ask.__signature__ = Signature([*parameters])  # type: ignore[attr-defined]
    return ask


def per_token(call: Callable, **options: Any) -> Callable:
    """A loss that wants advantages (N, T), numbers as mask, and always old log-probs."""

    def loss(log_probs, old_log_probs, advantages, completion_mask, **more):
        old = log_probs.detach() if old_log_probs is None else old_log_probs
        A, mask = advantages[:, None].expand_as(log_probs), completion_mask.to(log_probs.dtype)
        return call(log_probs, old, A, mask, **more)

    return asked(loss, "loss", **options)


def trl_trainer(kind: type, **settings: Any) -> Any:
    """A GRPOTrainer, or of a subclass, in training mode that holds settings and nothing else."""
    config = import_module("trl").GRPOConfig  # made, it would look for devices
    fields = [f for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING]
    usual = {f.name: f.default for f in fields}
    own = takewhile(lambda k: not k.__module__.startswith("trl."), kind.__mro__[:-1])
    code = "".join(getsource(getmodule(k)) for k in own)  # of a subclass, which may set more
    if unknown := sorted(settings.keys() - usual.keys() - {*re.findall(r"\w+", code)}):
        nor = f", nor has {kind.__name__}" * bool(code)
        raise TypeError(f"GRPOConfig has no {', '.join(unknown)}{nor}")
    args = SimpleNamespace(**{**usual, **settings, "pad_to_multiple_of": None, "report_to": []})
    args.steps_per_generation = args.gradient_accumulation_steps = 1  # all rows in one update
    trainer = kind.__new__(kind)
    vars(trainer).update(vars(args))  # __init__ copies many
    trainer.args, trainer.accelerator = args, ACCELERATOR
    trainer.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.state = SimpleNamespace(global_step=0)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.current_gradient_accumulation_steps, trainer.aux_loss_enabled = 1, False
    entropy = getattr(args, "entropy_coef", 0.0), getattr(args, "use_adaptive_entropy", False)
    trainer._entropy_bonus_enabled = any(entropy)
    return trainer


def trl_loss(trainer: Any, log_probs: Tensor, mask: Tensor, entropy: Tensor, **inputs: Any) -> Any:
    """What its `compute_loss` says of a model with these log-probs and entropies."""
    scorer = trainer._get_per_token_logps_and_entropies
    scored = (log_probs, entropy, None)[: 2 + ("compute_aux_loss" in signature(scorer).parameters)]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: scored
    ids = torch.zeros_like(mask)  # nobody reads them
    prompt = {"prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1])}
    prompt |= {"completion_ids": ids, "completion_mask": mask, "num_items_in_batch": mask.sum()}
    return trainer.compute_loss(None, prompt | {k: v for k, v in inputs.items() if v is not None})


def trl_advantages(trainer: Any, rewards: Tensor) -> Tensor:
    """Those of `_generate_and_score_completions`, in the dtype of the rewards."""
    N, token = len(rewards), [[1] for _ in rewards]
    trainer._generate = lambda prompts: (token, token, None, [""] * N, None, {}, None, None)
    trainer._calculate_rewards = lambda *_: rewards[:, None].clone()
    trainer.reward_weights = torch.ones(1, dtype=rewards.dtype)
    trainer.reward_func_names, trainer._tokenizer = ["reward"], SimpleNamespace(pad_token_id=0)
    trainer.environment_factories = trainer.environments = trainer.tools = None
    trainer._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(rewards.dtype)  # of G / (G - 1), a quotient of whole numbers
    try:
        made = trainer._generate_and_score_completions([{"prompt": ""} for _ in token])
        return made["advantages"]
    finally:
        torch.set_default_dtype(before)


def trl(own: Any = None, **settings: Any) -> Callable:
    """`_compute_loss` of GRPOTrainer or of a subclass; settings are GRPOConfig's."""
    if own not in (None, "advantages") and not isclass(own):
        name = getattr(own, "__name__", type(own).__name__)
        raise Unjudged(f"--from trl: expected a subclass of GRPOTrainer, and {name} is no class")
    kind = own if isclass(own) else import_module("trl").GRPOTrainer
    usual, capped = trl_trainer(kind, **settings), settings.get("loss_type") == "cispo"
    theirs = {ours: name for name, ours in WORDS.items() if hasattr(usual, name)}

    def loss(log_probs, old_log_probs, advantages, completion_mask, clip, **more):
        varied = {theirs[k]: more[k] for k in theirs.keys() & more.keys()}
        # cispo's epsilon_high is the cap itself
        varied |= {"epsilon": clip[0], "epsilon_high": clip[1] + capped}
        entropy = more.get("entropy", torch.zeros_like(log_probs))
        trainer, mask = trl_trainer(kind, **settings | varied), completion_mask.long()
        given = {"advantages": advantages, "old_per_token_logps": old_log_probs}
        given |= {"ref_per_token_logps": more.get("ref_log_probs"), ITEMS: more.get(ITEMS)}
        return trl_loss(trainer, log_probs, mask, entropy, **given)

    def advantages(rewards, group_size):
        return trl_advantages(trl_trainer(kind, **settings, num_generations=group_size), rewards)

    if own == "advantages":
        if not (version := metadata.version("trl")).startswith("1.16."):
            raise Unjudged(f"TRL's advantages are asked of TRL 1.16 alone, and here is {version}")
        return asked(advantages, "advantages")
    options = CLIP | (KL if usual.beta else {})
    options |= {"kl_correction": False} if usual.beta and own is None else {}
    options |= {"max_length": 8} if usual.loss_type == "dr_grpo" else {}
    options |= ENTROPY if usual._entropy_bonus_enabled else {}
    options |= {ITEMS: None} if usual.loss_type in ("dapo", "cispo", "vespo") else {}
    return asked(loss, "loss", **options)


def verl(own: Any = None, **settings: Any) -> Callable:
    """A policy loss by loss_mode, or somebody's; advantages by adv_estimator. verl's settings."""
    core = import_module("verl.trainer.ppo.core_algos")
    configs = import_module("verl.workers.config")
    if own == "advantages":
        return verl_advantages(core, **settings)
    ask = own or core.get_policy_loss_fn(settings.pop("loss_mode", "vanilla"))
    settings = {"strategy": "fsdp", "use_dynamic_bsz": True, "rollout_n": 1} | settings
    usual = configs.ActorConfig(**settings)
    whole = WHOLE[not usual.loss_agg_mode.startswith("token")]

    def loss(log_probs, old, A, mask, clip, ref_log_probs=None, kl_weight=0, max_length=None, **n):
        bounds = {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
        c = configs.ActorConfig(**settings | bounds)
        c.global_batch_info.update(n, loss_scale_factor=max_length)
        policy = dict(old_log_prob=old, log_prob=log_probs, advantages=A, response_mask=mask)
        how = {"loss_agg_mode": c.loss_agg_mode}
        value = first(ask(**policy, **how, config=c, rollout_is_weights=None))
        if kl_weight:
            kl = core.kl_penalty(log_probs, ref_log_probs, c.kl_loss_type)
            kl = core.agg_loss(loss_mat=kl, loss_mask=mask, **how, **c.global_batch_info)
            value = value + kl_weight * kl
        return value

    kl = usual.use_kl_loss or {"kl_loss_type", "kl_loss_coef"} & settings.keys()
    options = {"max_length": 8} if usual.loss_scale_factor else {}
    return per_token(loss, **CLIP, **options, **(KL if kl else {}), **whole)


def verl_advantages(core: Any, adv_estimator: str = "grpo", **settings: Any) -> Callable:
    estimate = core.get_adv_estimator_fn(adv_estimator)
    config = import_module("verl.trainer.config").AlgoConfig(**settings)
    more = {k: v for k, v in settings.items() if k in signature(estimate).parameters}

    def advantages(rewards, group_size):
        groups = torch.arange(len(rewards)).numpy() // group_size
        one = rewards[:, None].clone()  # a token each
        return estimate(one, torch.ones_like(one), index=groups, config=config, **more)[0][:, 0]

    return asked(advantages, "advantages")


def openrlhf(own: Any = None, kl_estimator: str | None = None, **settings: Any) -> Callable:
    """PolicyLoss, or somebody's class; with kl_estimator=k1, k2 or k3 the KL as a loss."""
    losses, utils = import_module("openrlhf.models.loss"), import_module("openrlhf.models.utils")
    kind = own or losses.PolicyLoss
    mean = getattr(losses, "aggregate_loss", utils.masked_mean)  # older ones don't have it
    whole = WHOLE[not getattr(kind(**settings), "token_level_loss", True)]
    whole = whole if whole.keys() <= signature(kind.forward).parameters.keys() else {}

    def loss(log_probs, old, A, mask, clip, ref_log_probs=None, kl_weight=0.0, **n):
        policy = kind(**settings | {"clip_eps_low": clip[0], "clip_eps_high": clip[1]})
        value = first(policy(log_probs, old, A, action_mask=mask, **n))
        if kl_weight:
            kl = utils.compute_approx_kl(log_probs, ref_log_probs, kl_estimator=kl_estimator)
            value = value + kl_weight * mean(kl, mask, **n)
        return value

    return per_token(loss, **CLIP, **(KL if kl_estimator else {}), **whole)


def torchtune(own: Any = None, **settings: Any) -> Callable:
    """GRPOLoss, or loss=GRPOCompletionLoss, GRPOSimpleLoss; or somebody's class."""
    name = settings.pop("loss", "GRPOLoss")
    there = find_spec("torchtune.dev")
    dev = [p for p in ("rl", "grpo") if there and find_spec(f"torchtune.dev.{p}")]
    if not dev and not own:
        raise Unjudged("this torchtune has no GRPO loss: they are in torchtune.dev, from source")
    kind = own or getattr(import_module(f"torchtune.dev.{dev[0]}.loss"), name)
    kind(**settings)

    def loss(log_probs, old, A, mask, epsilon, ref_log_probs, kl_weight):
        theirs = kind(**settings | {"epsilon": epsilon, "kl_coeff": kl_weight})
        return theirs(old, log_probs, ref_log_probs, A[:, 0], mask.bool())

    return per_token(loss, epsilon=0.2, **KL)


def nemo_rl(own: Any = None, **settings: Any) -> Callable:
    """ClippedPGLossFn, or somebody's class; settings are those of its loss_fn."""
    losses = import_module("nemo_rl.algorithms.loss")  # earlier ones take logits
    kind, configured = own or losses.ClippedPGLossFn, losses.ClippedPGLossConfig
    if unknown := settings.keys() - configured.__annotations__.keys():
        raise TypeError(f"ClippedPGLossConfig has no {', '.join(sorted(unknown))}")
    whole = "global_valid_toks" if settings.get("token_level_loss", True) else "global_valid_seqs"

    def loss(log_probs, old, A, mask, clip, ref_log_probs, kl_weight, **n):
        varied = dict(ratio_clip_min=clip[0], ratio_clip_max=clip[1])
        varied |= {"reference_policy_kl_penalty": kl_weight}
        columns = dict(token_mask=mask, advantages=A, prev_logprobs=old, generation_logprobs=old)
        columns |= {"reference_policy_logprobs": ref_log_probs}
        data = {k: torch.nn.functional.pad(v, (1, 0)) for k, v in columns.items()}  # the prompt
        data["sample_mask"] = torch.ones_like(mask[:, 0])
        counts = dict(global_valid_seqs=data["sample_mask"].sum(), global_valid_toks=mask.sum())
        return kind(configured(**settings | varied))(log_probs, data, **counts | n)

    return per_token(loss, **CLIP, **KL, **{whole: None})


LIBRARIES = {f.__name__: f for f in (trl, verl, openrlhf, torchtune, nemo_rl)}
