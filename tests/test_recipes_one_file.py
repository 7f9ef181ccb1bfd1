"""The recipe in one file computes what the package computes, and starts, stops and goes on."""

from __future__ import annotations

import ast
import copy
import csv
import importlib.util
import shutil
import sys
from types import SimpleNamespace

import pytest
import recipe_lines
import torch
from recipe_lines import RECIPES

from minigrpo.files import data_folder
from minigrpo.gpt import load_gpt
from minigrpo.grpo import GRPOConfig, learn
from minigrpo.logprobs import completion_log_probs_and_entropy
from minigrpo.objective import group_advantages
from minigrpo.sampling import Rollouts, left_pad, sample
from minigrpo.text.models import load_policy
from minigrpo.text.prompts import stop_tokens

NAME = "grpo_one_file.py"
SMALL = data_folder() / "text_llama"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("grpo_one_file", RECIPES / NAME)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Last(torch.nn.Module):
    """The char GPT as transformers' models are called: it gives the last logits alone."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt, self.config = gpt, gpt.config

    def forward(self, input_ids, logits_to_keep=0, **given):
        output = self.gpt(input_ids, **given)
        output.logits = output.logits[:, -logits_to_keep:]
        return output


def model_of(kind: str):
    """A policy, the tokens that end its texts, and how equal two computations are."""
    if kind == "char GPT":
        return (
            Last(load_gpt(data_folder() / "char_gpt.safetensors").double().eval()),
            [1, 43],
            1e-10,
        )
    policy, tokenizer = load_policy(data_folder() / kind, device="cpu", dtype=torch.float32)
    stops = list(stop_tokens(tokenizer, policy))
    return (policy.double(), stops, 1e-10) if kind == "text_gpt2" else (policy, stops, 1e-6)


# The norm of transformers' Llama computes in float32, whatever the weights are.
@pytest.fixture(params=["char GPT", "text_gpt2", "text_llama"])
def setting(request):
    policy, stops, close = model_of(request.param)
    prompts = left_pad([torch.arange(start, end) for start, end in ((3, 9), (20, 22), (30, 40))])
    # Ends that come soon, so that rows are ragged and some prompt's rows all end early.
    stops += [*range(40, 50)]
    return SimpleNamespace(policy=policy, prompts=prompts, stops=torch.tensor(stops), close=close)


def options(**given) -> SimpleNamespace:
    usual = {"max_new_tokens": 12, "bf16": False, "clip": (0.2, 0.25), "kl_weight": 0.0}
    return SimpleNamespace(**{**usual, "rows_per_pass": 2**30, **given})


def rollouts_of(setting, recipe, G=4):
    generator = torch.Generator().manual_seed(3)
    found = recipe.sample(setting.policy, *setting.prompts, G, setting.stops, options(), generator)
    lengths = found.completion_mask.sum(dim=1)
    assert 1 < lengths.max() and lengths.min() < lengths.max()  # ragged
    return found


def test_it_samples_the_same_tokens_with_the_same_log_probs(recipe, setting):
    ours = rollouts_of(setting, recipe)
    theirs = sample(
        setting.policy,
        *setting.prompts,
        max_new_tokens=12,
        completions_per_prompt=4,
        eos_id=setting.stops.tolist(),
        generator=torch.Generator().manual_seed(3),
    )
    for name in ("prompt_ids", "prompt_mask", "completions", "completion_mask"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    # In float32 a log-prob of -10 is the difference of two logits that carry 1e-6 each.
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=10 * setting.close)


def test_without_a_generator_it_is_greedy(recipe, setting):
    given = setting.policy, *setting.prompts
    ours = recipe.sample(*given, 2, setting.stops, options())
    theirs = sample(*given, max_new_tokens=12, top_k=1, eos_id=setting.stops.tolist())
    assert torch.equal(ours.completions[::2], theirs.completions)
    assert torch.equal(ours.completions[1::2], theirs.completions)


def test_it_scores_the_same_log_probs(recipe, setting):
    r = rollouts_of(setting, recipe)
    ours = recipe.score(setting.policy, r, options())
    theirs, _ = completion_log_probs_and_entropy(setting.policy, *r[:4])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * setting.close)
    torch.testing.assert_close(ours, r.log_probs, rtol=0, atol=10 * setting.close)


def test_equal_rewards_have_an_advantage_of_exactly_0(recipe):
    rewards = torch.full((6,), 0.2, dtype=torch.float64)
    assert (rewards != rewards[:3].mean()).any()  # rounding
    assert recipe.group_advantages(rewards, 3).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_has_the_same_advantages(recipe, dtype):
    rewards = torch.tensor([0, 1, 1.2, 0, 0.2, 0.2, 0.2, 0.2, 1.2, 0, 0, 0], dtype=dtype)
    ours = recipe.group_advantages(rewards, 4)
    theirs = group_advantages(rewards, 4)
    torch.testing.assert_close(ours.to(dtype), theirs, rtol=0, atol=1e-12)
    assert ours[4:8].eq(0).all()
    whole = recipe.group_advantages((rewards == 1).long(), 4)  # a reward may be 0 and 1, or bool
    assert torch.equal(whole, recipe.group_advantages((rewards == 1).double(), 4))
    assert torch.equal(whole, recipe.group_advantages(rewards == 1, 4))


CASES = {
    "once": {},
    "in passes": {"rows_per_pass": 5},
    "with a KL": {"kl_weight": 0.3, "rows_per_pass": 5},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", ["SGD", "AdamW"])
def test_it_takes_the_same_steps(recipe, setting, case, make):
    """SGD with a rate of 1 moves by the gradient itself; the second step has ratios beside 1."""
    r = rollouts_of(setting, recipe)
    advantages = torch.tensor([2.0, -1, 0, -1, 0, 0, 0, 0, -3, 1, 1, 1]).to(r.log_probs)
    given = {"clip": (0.2, 0.25), "kl_weight": 0.0, **CASES[case]}
    config = GRPOConfig(how="token_mean", max_new_tokens=12, inner_epochs=2, **given)
    reference = copy.deepcopy(setting.policy).requires_grad_(False) if given["kl_weight"] else None
    if reference:  # another policy, or the KL would be 0
        with torch.no_grad():
            next(reference.parameters()).mul_(1.05)
    found = []
    for update in (
        lambda policy, optimizer: [
            recipe.learn(policy, reference, optimizer, r, advantages, options(**given))
            for _ in range(2)
        ],
        lambda policy, optimizer: [
            metrics["grad_norm"]
            for metrics in learn(policy, reference, optimizer, Rollouts(*r), advantages, config)
        ],
    ):
        policy = copy.deepcopy(setting.policy)
        kind = getattr(torch.optim, make)
        rates = {"lr": 1.0} if make == "SGD" else {"lr": 2e-6, "betas": (0.9, 0.99)}
        norms = update(policy, kind(policy.parameters(), weight_decay=0.0, **rates))
        found.append((norms, [p.detach() for p in policy.parameters()]))
    (ours, mine), (theirs, others) = found
    assert ours == pytest.approx(theirs, rel=100 * setting.close)
    moved = [not torch.equal(p, start) for p, start in zip(mine, setting.policy.parameters())]
    assert any(moved)
    torch.testing.assert_close(mine, others, rtol=0, atol=setting.close)


def test_a_batch_without_spread_changes_nothing(recipe, setting):
    r = rollouts_of(setting, recipe)
    optimizer = torch.optim.SGD(setting.policy.parameters(), lr=1.0)
    before = copy.deepcopy(setting.policy.state_dict())
    assert recipe.learn(setting.policy, None, optimizer, r, torch.zeros(12), options()) == 0
    assert all(torch.equal(before[k], v) for k, v in setting.policy.state_dict().items())


def test_every_epoch_asks_each_question_once(recipe):
    rows = [{"question": str(i)} for i in range(10)]
    o = SimpleNamespace(prompts_per_step=5, seed=0)
    asked = [recipe.batch(rows, step, o) for step in range(1, 5)]
    assert all(len(batch) == 5 for batch in asked)
    first, second = asked[0] + asked[1], asked[2] + asked[3]
    assert sorted(row["question"] for row in first) == sorted(row["question"] for row in rows)
    assert sorted(row["question"] for row in second) == sorted(row["question"] for row in rows)
    assert first != second


def test_no_question_is_learned_from_and_measured_with(recipe):
    learned, held_out = recipe.questions()
    assert not {row["question"] for row in learned} & {row["question"] for row in held_out}
    assert len(held_out) >= 100
    for ask in (recipe.ASK, recipe.SHORT):
        for row in recipe.questions(ask)[0]:
            a, b = [int(w.strip(",.")) for w in row["question"].split() if w.strip(",.").isdigit()]
            assert int(row["answer"]) == (a + b if "gets" in row["question"] else a - b)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>3 - 1 = 2</think><answer>2</answer>", 1.2),
        (" <think></think>\n<answer> 2 </answer>\n", 1.2),
        ("<think>2</think><answer>3</answer>", 0.2),
        ("<think>2</think><answer>2</answer> I think", 0),
        ("<think>2</think><answer>2</answer><answer>2</answer>", 0),
        ("<think><answer>2</think></answer>", 0),
        ("2", 0),
    ],
)
def test_its_reward(recipe, text, value):
    assert recipe.reward(text, "2") == value


def test_a_step_learns_from_its_own_rewards(recipe, monkeypatch, tmp_path):
    """What `learn` gets: the rollouts of a step, and how they compare within their groups."""
    found = []

    def noted(policy, reference, optimizer, r, advantages, o):
        found.append((r, advantages))
        return 0.0

    monkeypatch.setattr(recipe, "learn", noted)
    # Of a reader who counts: a whole number.
    monkeypatch.setattr(
        recipe, "reward", lambda text, answer: text.count("1") + 2 * (answer in text)
    )
    o = recipe.options(["--smoke", "--inner-epochs", "1", "--out", str(tmp_path)])
    policy, tokenizer = recipe.load_policy(o)
    rows, stops = recipe.questions(recipe.SHORT)[0], recipe.stop_ids(policy, tokenizer, o)
    for metrics, texts in recipe.train_grpo(policy, None, None, tokenizer, rows, o):
        r, advantages = found.pop()
        assert texts == recipe.decode(tokenizer, r, stops)
        asked = recipe.batch(rows, metrics["step"], o)
        rewards = [recipe.reward(text, asked[i // 8]["answer"]) for i, text in enumerate(texts)]
        assert metrics["reward"] == sum(rewards) / 64
        theirs = group_advantages(torch.tensor(rewards), 8)
        torch.testing.assert_close(advantages, theirs)
        assert (advantages != advantages.round()).any()
        for i, row in enumerate(asked):
            ids = r.prompt_ids[8 * i][r.prompt_mask[8 * i]]
            assert tokenizer.decode(ids) == row["question"]


def test_it_needs_torch_and_transformers_alone():
    tree = ast.parse((RECIPES / NAME).read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        names |= {a.name for a in node.names} if isinstance(node, ast.Import) else set()
        names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    roots = {name.split(".")[0] for name in names}
    assert roots - {*sys.stdlib_module_names} == {"torch", "transformers"}


def without_template(folder):
    shutil.copytree(SMALL, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def test_every_line_runs_and_every_error_is_one_sentence(tmp_path, capsys):
    other = tmp_path / "no chat"
    with recipe_lines.noted(NAME) as ran:
        recipe_lines.run(NAME, "--smoke", "--out", tmp_path / "a")
        said = recipe_lines.fails(
            NAME, "--smoke", "--out", tmp_path / "a", "--lr", 1, capsys=capsys
        )
        assert "holds a run with other settings" in said
        said = recipe_lines.fails(NAME, "--smoke", "--model", "no-one/nothing", capsys=capsys)
        assert "--model no-one/nothing: not found" in said
        given = "--smoke", "--prompt", "chat", "--model", without_template(other)
        said = recipe_lines.fails(NAME, *given, capsys=capsys)
        assert "has no chat template: pass --prompt shots" in said
        for given in (("--group-size", 1), ("--prompts-per-step", 10**4)):
            said = recipe_lines.fails(NAME, "--smoke", *given, capsys=capsys)
            assert "a group has 2 completions or more, a step at most" in said
        said = recipe_lines.fails(NAME, "--smoke", "--rows-per-pass", 10**9, capsys=capsys)
        assert "GiB or more, and there are" in said
        small = "--smoke", "--steps", 1, "--questions", 4, "--prompts-per-step", 2, "--bf16"
        recipe_lines.run(NAME, *small, "--prompt", "chat", "--out", tmp_path / "b")
        small += "--max-new-tokens", 4, "--kl-weight", 0
        recipe_lines.run(NAME, *small, "--prompt", "shots", "--out", tmp_path / "c")
        # The same command goes on; here there is nothing left to do.
        recipe_lines.run(NAME, *small, "--prompt", "shots", "--out", tmp_path / "c")
    left = recipe_lines.left_out(NAME, ran)
    assert [line.split(": ", 1)[1] for line in left] == [
        "except KeyboardInterrupt:",
        'sys.exit("stopped; the same command goes on from the last checkpoint")',
    ]
    policy, tokenizer = load_policy(tmp_path / "a" / "model", device="cpu")
    assert not torch.equal(policy.lm_head.weight, load_policy(SMALL)[0].lm_head.weight)
    assert len(tokenizer) == 375


def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path, monkeypatch, recipe):
    def given(folder):
        short = "--smoke --steps 3 --save-every 1 --questions 4 --prompts-per-step 3 --out".split()
        return recipe.options([*short, str(folder)])

    recipe.main(given(tmp_path / "whole"))
    batch = recipe.batch

    def stops(rows, step, o):
        if step == 3:
            raise KeyboardInterrupt
        return batch(rows, step, o)

    monkeypatch.setattr(recipe, "batch", stops)
    with pytest.raises(KeyboardInterrupt):
        recipe.main(given(tmp_path / "parts"))
    monkeypatch.undo()
    recipe.main(given(tmp_path / "parts"))
    logs, weights = [], []
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        logs.append([*csv.DictReader((folder / "log.csv").open(encoding="utf-8"))])
        weights.append(load_policy(folder / "model")[0].state_dict())
    for line in (*logs[0], *logs[1]):
        assert float(line.pop("seconds")) > 0
    assert logs[0] == logs[1] and [line["step"] for line in logs[0]] == ["1", "2", "3"]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not [*tmp_path.rglob("*.part")]
