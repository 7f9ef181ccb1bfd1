"""The recipe in one file computes what the package computes, and starts, stops and goes on."""

import ast
import copy
import csv
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import recipe_lines
import torch
from recipe_lines import RECIPES
from support import with_bos

from minigrpo.files import data_folder
from minigrpo.gpt import load_gpt
from minigrpo.grpo import GRPOConfig, learn
from minigrpo.objective import group_advantages
from minigrpo.sampling import Rollouts, left_pad, sample
from minigrpo.text.models import load_pretrained
from minigrpo.text.prompts import stop_tokens

NAME = "grpo_one_file.py"
SMALL = data_folder() / "text_llama"


@pytest.fixture(scope="module")
def recipe():
    return recipe_lines.load("grpo_one_file")


class Last(torch.nn.Module):
    """The char GPT as transformers' models are called: it gives the last logits alone."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt, self.config = gpt, gpt.config
        self.generation_config = SimpleNamespace()

    def forward(self, input_ids, logits_to_keep=0, **given):
        output = self.gpt(input_ids, **given)
        output.logits = output.logits[:, -logits_to_keep:]
        return output


class ExactNorm(torch.nn.Module):
    """A Llama's norm; that of transformers computes in float32, whatever the weights are."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def model_of(kind: str):
    """A policy that computes in float64, and the tokens that end its texts."""
    if kind == "char GPT":
        return Last(load_gpt(data_folder() / "char_gpt.safetensors").double().eval()), [1, 43]
    policy, tokenizer = load_pretrained(data_folder() / kind, device="cpu", dtype=torch.float32)
    for name, module in [*policy.named_modules()]:
        if hasattr(module, "variance_epsilon"):
            policy.set_submodule(name, ExactNorm(module))
    return policy.double(), [*stop_tokens(tokenizer, policy)]


@pytest.fixture(params=["char GPT", "text_gpt2", "text_llama"])
def setting(request):
    policy, stops = model_of(request.param)
    prompts = left_pad([torch.arange(start, end) for start, end in ((3, 9), (20, 22), (30, 40))])
    # Ends that come soon, so that rows are ragged and some prompt's rows all end early.
    stops += [*range(40, 50)]
    policy.generation_config.eos_token_id = stops  # where the recipe looks for them
    return SimpleNamespace(policy=policy, prompts=prompts, stops=stops)


def options(**given) -> SimpleNamespace:
    usual = {"max_new_tokens": 12, "bf16": False, "clip": 0.2, "kl_weight": 0.0}
    return SimpleNamespace(**{**usual, "rows_per_pass": 2**30, **given})


def rollouts_of(setting, recipe, G=4) -> Rollouts:
    """What the recipe's sampler returns, in the package's form."""
    torch.manual_seed(3)
    ids, mask, log_probs = recipe.sample(setting.policy, *setting.prompts, G, options())
    S = setting.prompts[0].shape[1]
    rollouts = Rollouts(ids[:, :S], mask[:, :S], ids[:, S:], mask[:, S:], log_probs)
    lengths = rollouts.completion_mask.sum(dim=1)
    assert 1 < lengths.max() and lengths.min() < lengths.max()  # ragged
    return rollouts


def whole(r: Rollouts, recipe):
    """The recipe's form again."""
    return recipe.Rollouts(r.input_ids, r.attention_mask, r.log_probs)


def test_it_samples_the_same_tokens_with_the_same_log_probs(recipe, setting):
    ours = rollouts_of(setting, recipe)
    torch.manual_seed(3)
    given = {"max_new_tokens": 12, "eos_id": setting.stops}
    theirs = sample(setting.policy, *setting.prompts, completions_per_prompt=4, **given)
    for name in ("prompt_ids", "prompt_mask", "completions", "completion_mask"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=1e-9)
    # And the likeliest ones.
    ids, _, _ = recipe.sample(setting.policy, *setting.prompts, 2, options(), greedy=True)
    theirs = sample(setting.policy, *setting.prompts, top_k=1, **given)
    completions = ids[:, setting.prompts[0].shape[1] :]
    assert torch.equal(completions, theirs.completions.repeat_interleave(2, dim=0))


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
def test_it_takes_the_same_steps(recipe, setting, case):
    """SGD with a rate of 1 moves by the gradient itself; a second update has ratios beside 1."""
    r = rollouts_of(setting, recipe)
    rewards = torch.tensor([1.2, 0, 0.2, 0, 0.2, 0.2, 0.2, 0.2, 0, 1.2, 1.2, 1.2]).double()
    given = {"kl_weight": 0.0, "inner_epochs": 2, **CASES[case]}
    config = GRPOConfig(how="token_mean", max_new_tokens=12, **given)
    reference = copy.deepcopy(setting.policy).requires_grad_(False) if given["kl_weight"] else None
    if reference:  # a different policy, or the KL would be 0
        with torch.no_grad():
            next(reference.parameters()).mul_(1.05)
    advantages = group_advantages(rewards, 4).to(r.log_probs)
    o = options(group_size=4, **given)
    found = []
    for step in (
        lambda *models: recipe.learn(*models, whole(r, recipe), advantages, o),
        lambda *models: learn(*models, r, advantages, config),
    ):
        policy = copy.deepcopy(setting.policy)
        done = step(policy, reference, torch.optim.SGD(policy.parameters(), lr=1.0))
        found.append((done, [p.detach() for p in policy.parameters()]))
    (ours, mine), (theirs, others) = found
    norms = [[update["grad_norm"] for update in done] for done in (ours, theirs)]
    assert len(ours) == 2 and norms[0] == pytest.approx(norms[1], rel=1e-8)
    metrics = recipe.measure(whole(r, recipe), rewards, 4, setting.stops, ours)
    tokens = r.completion_mask.sum().item()
    ended = torch.isin(r.completions, torch.tensor(setting.stops)) & r.completion_mask
    assert metrics["truncated"] == pytest.approx(1 - ended.any(dim=1).double().mean().item())
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)
    assert ours[1]["mismatch"] > 1e-3 > 1e-6 > ours[0]["mismatch"] == metrics["mismatch"]
    assert metrics["reward"] == pytest.approx(rewards.mean().item())
    assert metrics["length"] == pytest.approx(tokens / 12)
    assert metrics["entropy"] == pytest.approx(-r.log_probs.sum().item() / tokens, rel=1e-6)
    moved = [not torch.equal(p, start) for p, start in zip(mine, setting.policy.parameters())]
    assert any(moved)
    torch.testing.assert_close(mine, others, rtol=0, atol=1e-10)


def test_no_numbers_are_learned_from_and_measured_with(recipe):
    sides = []
    for rows in recipe.make_data():
        pairs = [tuple(map(int, re.findall(r"\d+", row["question"]))) for row in rows]
        for row, (a, b) in zip(rows, pairs):
            assert int(row["answer"]) == (a + b if row["kind"] == "gets" else a - b)
        sides.append({*pairs})
    assert not sides[0] & sides[1] and len(rows) >= 100


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


def test_a_rollout_has_its_own_texts_and_rewards(recipe, monkeypatch, tmp_path):
    # Of a reader who counts: a whole number.
    counted = lambda text, answer: text.count("1") + 2 * (answer in text)  # noqa: E731
    monkeypatch.setattr(recipe, "reward", counted)
    o = recipe.parse(["--smoke", "--out", str(tmp_path)])
    policy, tokenizer = recipe.load(o)
    rows = recipe.make_data()[0][:100:15]
    (ids, mask, log_probs), texts, rewards = recipe.rollout(policy, tokenizer, rows, 8, o)
    assert len(texts) == len(rewards) == 8 * len(rows)
    S = ids.shape[1] - log_probs.shape[1]
    for i, text in enumerate(texts):
        row = rows[i // 8]
        assert tokenizer.decode(ids[i, :S][mask[i, :S]]).endswith(f"\n{row['question']}\n")
        assert tokenizer.decode(ids[i, S:][mask[i, S:]]).removesuffix("<|endoftext|>") == text
        assert rewards[i] == recipe.reward(text, row["answer"])
    assert len({*rewards.tolist()}) > 1 and any(text != texts[0] for text in texts)
    o.chat, o.max_new_tokens = True, 1
    (ids, mask, _), *_ = recipe.rollout(policy, tokenizer, rows[:1], 1, o)
    chat = [*recipe.SHOTS, {"role": "user", "content": rows[0]["question"]}]
    said = "".join(f"<|{turn['role']}|>{turn['content']}<|end|>\n" for turn in chat)
    assert tokenizer.decode(ids[0, :-1][mask[0, :-1]]) == said + "<|assistant|>"


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_has_one_bos(recipe, chat):
    """Which the chat template writes, and otherwise the tokenizer."""
    arguments = ["--smoke", "--max-new-tokens", "1", *["--chat"] * chat]
    o = recipe.parse(arguments)
    policy, tokenizer = recipe.load(o)
    tokenizer = with_bos(tokenizer)
    (ids, mask, _), *_ = recipe.rollout(policy, tokenizer, recipe.make_data()[0][:2], 1, o)
    bos = tokenizer.convert_tokens_to_ids("<|system|>")
    assert ((ids == bos) & mask)[:, :-1].sum(dim=1).tolist() == [1, 1]
    assert all(ids[row, mask[row]][0] == bos for row in (0, 1))


def test_a_stop_is_every_token_that_holds_it(recipe):
    policy, tokenizer = recipe.load(recipe.parse(["--smoke", "--stop", "\n"]))
    breaks = {i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])}
    assert breaks and {*policy.generation_config.eos_token_id} == breaks | {tokenizer.eos_token_id}


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


def stopped(capsys, said: str, *arguments: object) -> None:
    """A smoke run that ends early with code 2 and one line on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        recipe_lines.run(NAME, "--smoke", *arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error, error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_every_line_runs_and_every_error_is_one_sentence(tmp_path, recipe, capsys):
    other, (_, held_out) = tmp_path / "no chat", recipe.make_data()
    with recipe_lines.noted(NAME) as ran:
        recipe_lines.run(NAME, "--smoke", "--out", tmp_path / "a")
        for said, *arguments in (
            ("holds a run with other settings", "--out", tmp_path / "a", "--lr", 1),
            ("cannot load --model no-one/nothing", "--model", "no-one/nothing"),
            ("--model ./nothing: no such folder", "--model", "./nothing"),
            ("leave --chat out", "--chat", "--model", without_template(other)),
            ("GiB, and there are", "--rows-per-pass", 10**9),
            ("a group of one has nothing to be compared with", "--group-size", 1),
            ("--prompts-per-step: expected 1 or more, got 0", "--prompts-per-step", 0),
            ("--prompts-per-step: there are", "--prompts-per-step", 9999),
        ):
            stopped(capsys, said, *arguments)
        recipe_lines.run(NAME, "--smoke", "--ask", "--prompts-per-step", 2)
        assert re.search(
            r"^loses, \d+ questions: pass@1 0.\d+, pass@8 0", capsys.readouterr().out, re.M
        )
        small = "--smoke", "--steps", 1, "--prompts-per-step", 2, "--bf16", "--max-new-tokens", 4
        recipe_lines.run(NAME, *small, "--chat", "--out", tmp_path / "b")
        told = capsys.readouterr()
        assert "!!! After 1 steps in every group all rewards are equal" in told.err
        step = {"frac_reward_zero_std": 0.5, "truncated": 1.0}
        assert recipe.alarm([step, step]).startswith("no completion ends: raise --max-new")
        assert not recipe.alarm([step, {**step, "truncated": 0.9}])
        assert "a right completion earns 1.2, a wrong one 0.2" in told.out
        small += "--kl-weight", 0, "--stop", "\n", "--eval-every", 1
        recipe_lines.run(NAME, *small, "--out", tmp_path / "c")
        assert "held-out reward after 1 steps" in capsys.readouterr().out
        # The same command goes on; here there is nothing left to do.
        recipe_lines.run(NAME, *small, "--out", tmp_path / "c")
    left = recipe_lines.left_out(NAME, ran)
    assert [line.split(": ", 1)[1] for line in left] == [
        'sys.exit("stopped; the same command goes on from the last checkpoint")'
    ]
    policy, tokenizer = load_pretrained(tmp_path / "a" / "model", device="cpu")
    assert not torch.equal(policy.lm_head.weight, load_pretrained(SMALL)[0].lm_head.weight)
    assert len(tokenizer) == 375
    assert len(torch.load(tmp_path / "a" / "checkpoint.pt")["before"]) == len(held_out)


@pytest.mark.parametrize("missing", ["a reward", "a learning rate"])
def test_without_a_reward_or_a_rate_a_run_goes_to_its_end_and_changes_nothing(
    tmp_path, monkeypatch, capsys, recipe, missing
):
    """Nor are held-out questions answered otherwise, since they are asked without chance."""
    short = [rows[:12] for rows in recipe.make_data()]
    monkeypatch.setattr(recipe, "make_data", lambda: short)
    paid = (lambda text, answer: 0.0) if missing == "a reward" else lambda text, answer: len(text)
    monkeypatch.setattr(recipe, "reward", paid)
    given = ["--lr", "0.01" if missing == "a reward" else "0", "--kl-weight", "0"]
    recipe.main(recipe.parse(["--smoke", *given, "--out", str(tmp_path)]))
    *_, before, after = capsys.readouterr().out.splitlines()
    assert before.replace("before", "after") == after and "held-out reward after" in after
    log = [*csv.DictReader((tmp_path / "log.csv").open(encoding="utf-8"))]
    assert [float(line["grad_norm"]) > 0 for line in log] == [missing != "a reward"] * 2
    trained = load_pretrained(tmp_path / "model", device="cpu")[0].state_dict()
    start = load_pretrained(SMALL, device="cpu")[0].state_dict()
    assert all(torch.equal(start[name], trained[name]) for name in start)
    (group,) = torch.load(tmp_path / "checkpoint.pt")["optimizer"]["param_groups"]
    assert (group["lr"], group["betas"]) == (float(given[1]), (0.9, 0.99))
    assert group["weight_decay"] == 0
    recipe.main(recipe.parse(["--smoke", *given, "--seed", "1", "--out", str(tmp_path / "other")]))
    other = csv.DictReader((tmp_path / "other" / "log.csv").open(encoding="utf-8"))
    assert [line["length"] for line in log] != [line["length"] for line in other]


def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path, monkeypatch, recipe):
    def given(folder):
        short = "--smoke --steps 3 --save-every 1 --prompts-per-step 3 --out".split()
        return recipe.parse([*short, str(folder)])

    recipe.main(given(tmp_path / "whole"))
    learn, steps = recipe.learn, iter(range(1, 4))

    def stops(*given):
        if next(steps) == 3:
            raise KeyboardInterrupt
        return learn(*given)

    monkeypatch.setattr(recipe, "learn", stops)
    with pytest.raises(KeyboardInterrupt):
        recipe.main(given(tmp_path / "parts"))
    monkeypatch.undo()
    recipe.main(given(tmp_path / "parts"))
    logs, weights = [], []
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        logs.append([*csv.DictReader((folder / "log.csv").open(encoding="utf-8"))])
        weights.append(load_pretrained(folder / "model")[0].state_dict())
    for line in (*logs[0], *logs[1]):
        assert float(line.pop("seconds")) > 0
    assert logs[0] == logs[1] and [line["step"] for line in logs[0]] == ["1", "2", "3"]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not [*tmp_path.rglob("*.part")]
