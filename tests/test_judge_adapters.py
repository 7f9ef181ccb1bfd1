"""`grpo-judge --from`: the losses of other libraries, and what the help shows.

TRL is asked for real, as installed: 1.16 (by hand also the losses of 0.29, 1.0 and 1.8). Asked by
hand with the real package: verl 0.9.1, OpenRLHF 0.11.2 (with stubs for deepspeed and flash_attn)
and torchtune 0.6.1 with the file torchtune/dev/rl/loss.py, which its wheel lacks. NeMo-RL was
asked in a stub package around its ClippedPGLossFn. Here these four are small packages of the same
form, which show that every tensor and setting arrives where it should.
"""

import importlib.util
import json
import os
import re
import shlex
import sys
from textwrap import dedent

import pytest

from minigrpo.clinic.judge.command import HELP, load, main
from minigrpo.clinic.judge.report import Unjudged
from minigrpo.clinic.judge.verdict import CAUTIONS, judge_loss

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")


def judged(*words: str):
    return judge_loss(load([*words]))


@needs_trl
@pytest.mark.parametrize(
    ("words", "built_in"),
    [
        ("loss_type=grpo beta=0.04", {"how": "sequence_mean", "estimator": "k3"}),
        ("loss_type=bnpo", {"how": "token_mean"}),
        ("loss_type=dr_grpo", {"how": "constant"}),
        ("loss_type=dapo", {"how": "token_mean"}),
        ("loss_type=dapo entropy_coef=0.01", {"how": "token_mean"}),
        ("loss_type=cispo", {"surrogate": "cispo"}),
        ("loss_type=grpo importance_sampling_level=sequence", {"level": "geometric"}),
        ("advantages scale_rewards=none", {"scale": "none"}),
    ],
)
def test_trls_own_are_right(words, built_in):
    report = judged("trl", *words.split())
    assert report.verdict == "right", report.text
    assert built_in.items() <= report.details["built_in"].items()
    assert report.details["trl"]["agree"] == report.details["trl"]["asked"] > 0
    adds_up = "add up" in report.details["micro_batches"]
    assert adds_up == words.startswith(("loss_type=dapo", "loss_type=cispo"))


@needs_trl
def test_what_trl_does_too_is_a_caution():
    loss, advantages = judged("trl", "beta=0.04"), judged("trl", "advantages")
    assert {*loss.cautions, *advantages.cautions} == {*CAUTIONS}


MY_TRAINER = """
import torch
from trl import GRPOTrainer


class MyTrainer(GRPOTrainer):
    def __init__(self, *args, my_weight, **kwargs):
        super().__init__(*args, **kwargs)
        self.my_weight = my_weight

    def _compute_loss(self, model, inputs):
        mask, ids = inputs["completion_mask"], inputs["completion_ids"]
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, ids.size(1))
        old = inputs.get("old_per_token_logps")
        ratio = torch.exp(logps - (logps.detach() if old is None else old))
        A = inputs["advantages"].unsqueeze(1)
        clipped = torch.clamp(ratio, 1 - self.epsilon_low, 1 + self.epsilon_high)
        loss = -torch.min(ratio * A, clipped * A)
        if self.beta:
            d = inputs["ref_per_token_logps"] - logps
            loss = loss + 2 * self.my_weight * self.beta * (torch.exp(d) - d - 1)
        self._metrics["train"]["loss"].append(self.accelerator.gather(loss.mean()).item())
        return (loss * mask).sum() / mask.sum().clamp(min=1)


class Negated(GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return -super().compute_loss(model, inputs)
"""
MINE = "MyTrainer beta=0.1 my_weight=0.5"


@needs_trl
@pytest.mark.parametrize(
    ("edit", "words", "found"),
    [
        (("", ""), MINE, "notes"),
        (("torch.min(", "torch.max("), MINE, ["max_for_min"]),
        (("(torch.exp(d) - d", "(torch.exp(-d) + d"), MINE, ["k3_with_the_opposite_sign"]),
        (('d = inputs["ref', 'd = inputs["old'), MINE, ["kl_against_the_old_policy"]),
        (("", ""), "Negated loss_type=dapo", ["loss_minimises_the_objective"]),
    ],
)
def test_a_mistake_in_a_subclass_is_named(tmp_path, edit, words, found):
    (path := tmp_path / "mine.py").write_text(MY_TRAINER.replace(*edit))
    name, *settings = words.split()
    report = judged("trl", f"{path}:{name}", *settings)
    assert (report.mistakes or report.verdict) == found, report.text


TERMS = """
import torch


def policy(new, old, A, low, high):
    ratio = (new - old).exp()
    return -torch.min(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


def mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)
"""
FAKES = {
    "terms.py": TERMS,
    "verl/trainer/ppo/core_algos.py": """
from terms import *


def get_policy_loss_fn(name):
    return {"vanilla": vanilla}[name]


def vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean",
            config=None, rollout_is_weights=None):
    low, high = config.clip_ratio_low, config.clip_ratio_high
    x = policy(log_prob, old_log_prob, advantages, low, high)
    return agg_loss(x, response_mask, loss_agg_mode, **config.global_batch_info), {}


def agg_loss(loss_mat, loss_mask, loss_agg_mode, batch_num_tokens=None, global_batch_size=None,
             loss_scale_factor=None):
    if loss_agg_mode == "token-mean":
        return (loss_mat * loss_mask).sum() / batch_num_tokens
    return (loss_mat * loss_mask).sum() / global_batch_size / loss_scale_factor


def kl_penalty(logprob, ref_logprob, kl_penalty):
    return {"low_var_kl": k3}[kl_penalty](logprob, ref_logprob)


def get_adv_estimator_fn(name):
    return {"grpo": grpo}[name]


def grpo(token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True,
         config=None):
    groups = token_level_rewards[:, 0].view(index.max() + 1, -1)
    A = groups - groups.mean(1, keepdim=True)
    if norm_adv_by_std_in_grpo:
        A = A / (groups.std(1, keepdim=True) + epsilon)
    return A.view(-1, 1) * response_mask, None
""",
    "verl/trainer/config.py": """
from dataclasses import dataclass


@dataclass
class AlgoConfig:
    norm_adv_by_std_in_grpo: bool = True
""",
    "verl/workers/config.py": """
from dataclasses import dataclass, field


@dataclass
class ActorConfig:
    strategy: str
    rollout_n: int
    use_dynamic_bsz: bool
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int | None = None
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    global_batch_info: dict = field(default_factory=dict)
""",
    "openrlhf/models/loss.py": """
from terms import *


class PolicyLoss(torch.nn.Module):
    def __init__(self, clip_eps_low=0.2, clip_eps_high=0.2, policy_loss_type="ppo"):
        super().__init__()
        self.clip = clip_eps_low, clip_eps_high

    def forward(self, log_probs, old_log_probs, advantages, action_mask, batch_num_tokens=None):
        x = policy(log_probs, old_log_probs, advantages, *self.clip)
        return aggregate_loss(x, action_mask, batch_num_tokens=batch_num_tokens), 0


def aggregate_loss(loss, loss_mask, token_level_loss=True, batch_num_tokens=None):
    return (loss * loss_mask).sum() / batch_num_tokens
""",
    "openrlhf/models/utils.py": """
from terms import k3
from terms import mean as masked_mean


def compute_approx_kl(log_probs, log_probs_base, log_probs_old=None, kl_estimator="k1"):
    return {"k3": k3}[kl_estimator](log_probs, log_probs_base)
""",
    "torchtune/dev/grpo/loss.py": """
from terms import *


class GRPOLoss(torch.nn.Module):
    def __init__(self, epsilon=0.1, kl_coeff=0.1):
        super().__init__()
        self.epsilon, self.kl_coeff = epsilon, kl_coeff

    def forward(self, pi_old_logprobs, pi_logprobs, ref_logprobs, advantages, padding_masks=None):
        A = advantages[:, None]
        x = policy(pi_logprobs, pi_old_logprobs, A, self.epsilon, self.epsilon)
        return mean(x + self.kl_coeff * k3(pi_logprobs, ref_logprobs), padding_masks), 0


class GRPOSimpleLoss(GRPOLoss):
    def forward(self, pi_old_logprobs, pi_logprobs, *more):  # on-policy: no clip
        return super().forward(pi_logprobs.detach(), pi_logprobs, *more)
""",
    "nemo_rl/algorithms/loss.py": """
from dataclasses import dataclass
from terms import *


@dataclass
class ClippedPGLossConfig:
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    reference_policy_kl_penalty: float = 0.01
    token_level_loss: bool = True


class ClippedPGLossFn:
    def __init__(self, cfg):
        self.cfg = cfg

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        assert data["sample_mask"].sum() == global_valid_seqs
        new, (old, ref, A, mask) = next_token_logprobs, (data[k][:, 1:] for k in (
            "prev_logprobs", "reference_policy_logprobs", "advantages", "token_mask"))
        x = policy(new, old, A, self.cfg.ratio_clip_min, self.cfg.ratio_clip_max)
        x = x + self.cfg.reference_policy_kl_penalty * k3(new, ref)
        return (x * mask).sum() / global_valid_toks.clamp(min=1), {}
""",
}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    for name, source in FAKES.items():
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        for folder in [*path.parents][: name.count("/")]:
            (folder / "__init__.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in {*map(top, FAKES), "my_trainer", "judged"}:
            del sys.modules[name]


def top(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


@pytest.mark.parametrize(
    ("words", "built_in"),
    [
        ("verl kl_loss_coef=0.001", {"how": "token_mean", "estimator": "k3"}),
        ("verl loss_agg_mode=seq-mean-token-sum-norm loss_scale_factor=9", {"how": "constant"}),
        ("verl advantages", {"scale": "group", "eps": 1e-6}),
        ("verl advantages norm_adv_by_std_in_grpo=False", {"scale": "none"}),
        ("openrlhf kl_estimator=k3 policy_loss_type=ppo", {"estimator": "k3"}),
        ("torchtune", {"how": "token_mean"}),
        ("torchtune loss=GRPOSimpleLoss", {"how": "token_mean"}),
        ("nemo_rl token_level_loss=True", {"how": "token_mean"}),
    ],
)
def test_each_tensor_and_setting_of_a_library_arrives(fakes, words, built_in):
    report = judged(*words.split())
    assert report.verdict == ("notes" if "Simple" in words else "right"), report.text
    assert built_in.items() <= report.details["built_in"].items()
    adds_up = "add up" in report.details["micro_batches"]
    assert adds_up == ("advantages" not in words and "torchtune" not in words)  # it has no count


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trl loss_tpye=dapo", "trl can't be asked: TypeError: GRPOConfig has no loss_tpye"),
        ("trl my_trainer.py:MyTrainer typo=3", "GRPOConfig has no typo, nor has MyTrainer"),
        ("trl my_trainer.py:loss", "expected a subclass of GRPOTrainer, and loss is no class"),
        ("trl nowhere.py:MyTrainer", "there is no file 'nowhere.py'"),
        ("verl clip=1", "verl can't be asked: TypeError"),
        ("openrlhf advantages", "openrlhf has no function of its own that makes advantages"),
        ("torchtune loss=Other", "torchtune can't be asked: AttributeError"),
        ("nemo_rl x=1", "nemo_rl can't be asked: TypeError: ClippedPGLossConfig has no x"),
        ("skyrl", "expected one of trl, verl, openrlhf, torchtune, nemo_rl, got 'skyrl'"),
    ],
)
def test_what_cannot_be_asked_is_told_in_one_sentence(tmp_path, fakes, monkeypatch, words, told):
    if words.startswith("trl"):
        pytest.importorskip("trl", reason="needs TRL")
    (tmp_path / "my_trainer.py").write_text(f"{MY_TRAINER}\n\ndef loss(): ...\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unjudged) as error:
        load(words.split())
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("minigrpo.clinic.judge.adapters.find_spec", lambda name: None)
    with pytest.raises(Unjudged, match=r"nemo_rl isn't installed here \(pip install nemo-rl\)"):
        load(["nemo_rl"])


@needs_trl
def test_what_trl_refuses_when_asked():
    assert "it raises ValueError: Unknown loss type: gpro" in judged("trl", "loss_type=gpro").text


def test_the_command_asks_in_a_process_of_its_own(fakes, capsys):
    assert main(["--from", "openrlhf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "right"
    assert not {"openrlhf", "terms"} & {*sys.modules}


BESIDE = """


def my_loss(pi, mu, adv, mask, clip=(0.2, 0.2)):
    return policy_loss(pi, pi.detach() if mu is None else mu, adv[:, None], mask.float(), *clip)


def policy_loss(new, old, A, mask, low, high):
    ratio = (new - old).exp()
    return -((torch.min(ratio * A, ratio.clamp(1 - low, 1 + high) * A)) * mask).sum() / mask.sum()


def training_step(model, batch):
    new = score(model, batch)
    old = new.detach() if batch["old"] is None else batch["old"]
    return policy_loss(new, old, batch["advantages"][:, None], batch["mask"].float(), 0.2, 0.2)
"""
BLOCKS = [dedent(b) for b in re.findall(r"(?:^(?: {4}.*)?\n)+", HELP, re.M) if b.strip()]
COMMANDS = [line for b in BLOCKS for line in b.splitlines() if line.startswith("grpo-judge")]
SNIPPETS = [block for block in BLOCKS if "def loss(" in block]


def test_the_help_has_what_is_tested_here():
    assert len(COMMANDS) >= 6 and len(SNIPPETS) == 2 and len(HELP.splitlines()) <= 50


@pytest.mark.parametrize("number", range(len(COMMANDS) + len(SNIPPETS)))
def test_every_example_of_the_help_works(tmp_path, fakes, monkeypatch, capsys, number):
    example = (COMMANDS + [f"grpo-judge mine.py:loss\n{block}" for block in SNIPPETS])[number]
    command, _, source = example.partition("\n")
    if "--from trl" in command:
        pytest.importorskip("trl", reason="needs TRL")
    trainer = MY_TRAINER if "--from trl" in command else "import torch\n"
    (tmp_path / "my_trainer.py").write_text(trainer + BESIDE)
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)

    def here(target, built_in, seconds, names, like):
        return judge_loss(load(target), names, like, **built_in)

    monkeypatch.setattr("minigrpo.clinic.judge.command.judge_file", here)
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().out
