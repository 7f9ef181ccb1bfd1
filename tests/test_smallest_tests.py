"""The file of smallest tests works alone, on code that has never heard of this course."""

import inspect
import json
import shutil
import subprocess
import sys

import pytest

from minigrpo.clinic import smallest_tests
from minigrpo.clinic.patients import PATIENTS

STAND_ALONE = '''
"""GRPO for a policy that is one table of logits, and nothing but torch."""
from types import SimpleNamespace

import torch
from torch import nn

PROMPTS = torch.tensor([[1, 2], [3, 4]])
EOS, PAD, LENGTH, GROUP = 5, 0, 6, 4

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(6, 6))
    def forward(self, input_ids):
        return SimpleNamespace(logits=self.table[input_ids])

policy = Table()

def sample():
    torch.manual_seed(1)
    ids = PROMPTS.repeat_interleave(GROUP, 0)
    log_probs, mask, done = [], [], torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(LENGTH):
        logits = policy(ids).logits[:, -1]
        token = torch.multinomial(logits.softmax(-1), 1)
        log_probs.append(logits.log_softmax(-1).gather(-1, token)[:, 0])
        mask.append(~done)
        done = done | (token[:, 0] == EOS)
        ids = torch.cat([ids, token], 1)
    return ids, torch.stack(log_probs, 1).detach(), torch.stack(mask, 1)

def score(model, prompts, completions):
    ids = torch.cat([prompts, completions], 1)
    logits = model(ids).logits[:, prompts.shape[1] - 1:-1]
    return logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]

def rescore(ids):
    return score(policy, ids[:, :2], ids[:, 2:])

def reward(completion):
    return completion.count(4) / LENGTH

def rewards(factor=1.0):
    return torch.tensor([reward(row.tolist()) for row in sample()[0][:, 2:]])

def advantages(r, group_size):
    g = r.double().view(-1, group_size)
    a = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)
    equal = g.amax(1) == g.amin(1)
    return torch.where(equal[:, None], 0.0, a).flatten().float()

def kl(new, ref):
    return torch.exp(ref - new) - 1 - (ref - new)

def loss(new, old, A, mask, ref=None, entropy=None):
    ratio = (new - old).exp()
    A = A[:, None]
    token = -torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A)
    if ref is not None:
        token = token + kl(new, ref)
    value = (token * mask).sum() / mask.sum()
    if entropy is not None:
        value = value - 0.1 * (entropy * mask).sum() / mask.sum()
    return value

def pad(prompts):
    width = max(map(len, prompts))
    return torch.stack([nn.functional.pad(p, (width - len(p), 0), value=PAD) for p in prompts])

def step():
    ids, old, mask = sample()
    A = advantages(rewards(), GROUP)
    new = rescore(ids)
    value = loss(new, old, A, mask)
    policy.zero_grad()
    value.backward()
    with torch.no_grad():
        for p in policy.parameters():
            p -= 0.05 * p.grad
    return value.item(), A, mask, (new - old).exp().detach()[mask]

def first_kl():
    ids, log_probs, _ = sample()
    return kl(rescore(ids), log_probs).mean()
'''
GIVEN = {  # what each test is asked with
    "the_ratio_has_a_gradient": "mine.loss",
    "the_padding_gets_no_gradient": "mine.loss",
    "a_low_ratio_of_a_bad_token_is_left_alone": "mine.loss",
    "a_small_drift_of_a_long_text_keeps_its_gradient": "mine.loss",
    "the_loss_depends_on_the_reference": "mine.loss",
    "the_kl_term_has_a_mean_gradient": "mine.kl",
    "the_entropy_bonus_has_a_gradient": "lambda *g: mine.loss(*g[:4], entropy=g[4])",
    "a_right_answer_is_rewarded": "mine.reward, [1, 4]",
    "a_wrong_answer_is_not_rewarded": "mine.reward, [1, 1]",
    "luck_of_the_prompt_is_no_advantage": "mine.advantages",
    "equal_rewards_give_no_advantage": "mine.advantages",
    "rewards_do_not_ask_the_policy": "mine.rewards",
    "a_certain_text_has_log_prob_0": "mine.score",
    "sampler_and_scorer_agree": "mine.sample, mine.rescore",
    "completions_end": "mine.sample",
    "prompts_end_in_the_last_column": "mine.pad",
    "the_kl_is_0_before_the_first_update": "mine.first_kl",
    "the_ratio_is_1_at_every_first_update": "lambda: [mine.step()[-1] for _ in range(3)]",
    "the_loss_is_the_one_by_hand": "lambda: mine.step()[:3]",
    "weights_move": "mine.policy, lambda: [mine.step() for _ in range(5)]",
}
CALLS = """
import json
import sys
import types
for name in ("minigrpo", "transformers", "pytest"):
    sys.modules[name] = None  # importing it is an error
from smallest_tests import *

mine, everything = types.ModuleType("mine"), []
given, sources = json.load(open("asked.json"))
for source in sources:
    vars(mine).clear()
    exec(source, vars(mine))
    said = {}
    for name, arguments in given.items():
        try:
            eval(f"{name}({arguments})")
        except AssertionError as error:
            said[name] = str(error)
    everything.append(said)
print(json.dumps(everything))
"""
HELPERS = {"relative_change"}
TESTS = {
    name
    for name, function in inspect.getmembers(smallest_tests, inspect.isfunction)
    if function.__module__ == smallest_tests.__name__ and not name.startswith("_")
} - HELPERS
BUG = ("return completion.count(4) / LENGTH", "return 0.5")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What is said of healthy code and of a bug, in a folder with nothing else in it."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(smallest_tests.__file__, folder / "smallest_tests.py")
    sources = [STAND_ALONE, STAND_ALONE.replace(*BUG)]
    assert sources[0] != sources[1]
    (folder / "asked.json").write_text(json.dumps([GIVEN, sources]), encoding="utf-8")
    (folder / "check.py").write_text(CALLS, encoding="utf-8")
    command = [sys.executable, "-E", "-B", "check.py"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_alone_every_test_passes_on_healthy_code_and_a_bug_is_told_in_a_sentence(alone):
    assert alone[0] == {} and set(GIVEN) == TESTS
    told = alone[1]["a_wrong_answer_is_not_rewarded"]
    assert len(told) > 20 and "\n" not in told


def test_the_loop_is_asked_every_test_that_needs_no_numbers_of_a_run():
    asked = {patient.test[0] for patient in PATIENTS if patient.test}
    assert asked == TESTS
