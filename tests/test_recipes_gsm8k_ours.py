"""GSM8K with our own loop: it starts, it stops and goes on, and says what is wrong."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import recipe_lines
import torch
from safetensors.torch import load_file

from minigrpo.files import data_folder
from minigrpo.grpo import train_grpo
from minigrpo.text.gsm8k import like_gsm8k
from minigrpo.text.models import load_policy
from minigrpo.text.prompts import TextProblems

NAME = "gsm8k_ours.py"
SMALL = data_folder() / "text_llama"
TINY = (
    *("--device", "cpu", "--steps", 1, "--prompts", 2, "--group", 2, "--tokens", 8),
    *("--rows-per-pass", 3, "--questions", 4),
)
PAID = {"tags_reward": 0.2, "answer_reward": 1.0}


def weights(folder):
    return load_policy(folder / "model", device="cpu", dtype=torch.float32)[0].state_dict()


def logged(folder):
    return [*csv.DictReader((folder / "log.csv").open(encoding="utf-8"))]


def without_template(folder):
    """A model that can't chat, with room for a few shots."""
    shutil.copytree(SMALL, folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    return folder


@pytest.fixture
def dashboard(monkeypatch):
    """Stands for trackio and wandb, which have the same three functions."""
    calls = []
    module = SimpleNamespace(
        init=lambda **given: calls.append(("init", given)),
        log=lambda values, step: calls.append(("log", step, values)),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, "trackio", module)
    return calls


def test_every_line_runs_and_every_error_is_one_sentence(tmp_path, capsys, dashboard, monkeypatch):
    data = like_gsm8k(tmp_path)

    def fails(*arguments):
        return recipe_lines.fails(NAME, *TINY, *arguments, capsys=capsys)

    with recipe_lines.noted(NAME) as ran:
        recipe_lines.run(NAME, "--smoke")
        said = capsys.readouterr().out
        assert "before: " in said and "after 2 steps: " in said and " +- " in said
        assert said.count(" of 8 held-out questions right") == 2
        # A chat, in bfloat16, with gradient checkpointing.
        given = "--model", SMALL, "--data", data, "--out", tmp_path / "a"
        given += *TINY, "--dtype", "bfloat16", "--checkpointing", "--log", "trackio"
        recipe_lines.run(NAME, *given)
        recipe_lines.run(NAME, *given, "--steps", 2)  # it goes on
        assert "the run there has lr = 1e-06, and this one 1.0" in fails(*given, "--lr", 1)
        assert "--steps 1: the run in" in fails(*given, "--steps", 1)
        assert "wandb is not installed: pip install wandb" in fails(*given, "--log", "wandb")
        assert "has room for 128 in all" in fails(*given, "--tokens", 128)
        # Plain text after solved questions, asked of a model that can't chat.
        other = without_template(tmp_path / "no chat")
        given = "--model", other, "--data", data, "--out", tmp_path / "b"
        assert "no chat template, so it is no chat model; pass --shots 3" in fails(*given)
        recipe_lines.run(NAME, *TINY, *given, "--shots", 2)
        said = fails("--model", "no-one/nothing", "--data", data)
        assert said.startswith("error: --model no-one/nothing: expected a model's folder or its")
        said = fails(*given, "--shots", 2, "--rows-per-pass", 10**9)
        assert said.startswith("error: training needs at least") and "GiB" in said
        wrong = tmp_path / "wrong.csv"
        wrong.write_text("frage,answer\n" + "1,#### 1\n" * 20, encoding="utf-8")
        said = fails("--model", SMALL, "--data", wrong)
        assert "expected the columns question, found frage, answer" in said
        assert "got [Errno 2]" in fails("--model", SMALL, "--data", tmp_path / "none.jsonl")
        # Ctrl-C in the middle of a step.
        draw = TextProblems.prompts
        stop = lambda *given: os.kill(os.getpid(), signal.SIGINT) or draw(*given)  # noqa: E731
        monkeypatch.setattr(TextProblems, "prompts", stop)
        given = "--model", SMALL, "--data", data, "--out", tmp_path / "c", "--steps", 9
        said = recipe_lines.fails(NAME, *TINY, *given, capsys=capsys, code=130)
        assert said == "interrupted: the same command goes on from the last checkpoint"
    assert torch.load(tmp_path / "c" / "checkpoint.pt")["step"] == 1
    assert [line["step"] for line in logged(tmp_path / "c")] == ["1"]
    assert recipe_lines.left_out(NAME, ran) == []
    assert [line["step"] for line in logged(tmp_path / "a")] == ["1", "2"]
    assert [call[0] for call in dashboard].count("log") == 2 and dashboard[-1] == ("finish",)
    saved = load_file(tmp_path / "a" / "model" / "model.safetensors")  # computed in bfloat16
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_the_loop_gets_the_settings(tmp_path, monkeypatch):
    found = {}

    def noted(policy, task, config, **given):
        found.update(policy=policy, task=task, config=config, **given)
        return train_grpo(policy, task, config, **given)

    monkeypatch.setattr("minigrpo.grpo.train_grpo", noted)
    given = "--out", tmp_path, "--dtype", "bfloat16", "--checkpointing", "--lr", 3e-4, "--seed", 5
    given += "--kl", 0.5, "--rows-per-pass", 6, "--tokens", 30, "--prompts", 3, "--group", 2
    recipe_lines.run(NAME, "--smoke", *given)
    config, policy = found["config"], found["policy"]
    assert (config.dtype, config.lr, config.seed, config.kl_weight) == ("bfloat16", 3e-4, 5, 0.5)
    assert (config.rows_per_pass, config.max_new_tokens) == (6, 30)
    assert (config.prompts_per_step, config.group_size, config.steps) == (3, 2, 2)
    assert (config.how, config.clip, config.eos_id) == ("token_mean", (0.2, 0.28), (0,))
    assert policy.dtype == torch.float32
    assert any(getattr(m, "gradient_checkpointing", False) for m in policy.modules())
    rewards = [function.__name__ for function in found["task"].reward_functions]
    assert dict(zip(rewards, found["task"].weights, strict=True)) == PAID
    assert found["checkpoint"].parent == tmp_path


def test_the_line_break_that_ends_an_answer_costs_no_reward(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(
        "minigrpo.grpo.train_grpo", lambda *given, **more: found.extend(given) or []
    )
    model = without_template(tmp_path / "no chat")
    given = "--model", model, "--data", like_gsm8k(tmp_path), "--out", tmp_path / "a", "--shots", 1
    recipe_lines.run(NAME, *TINY, *given)
    policy, task, config = found
    # A vocabulary like Qwen's has ">\n" as one token, and none of the small ones has.
    token = ">" + "\n"
    task.tokenizer.add_tokens([token])
    asked = [torch.tensor([*task._by_ids][0])]
    answer = task._by_ids[tuple(asked[0].tolist())]["answer"]
    ids = task.tokenizer(f"<think>so</think><answer>{answer}<")["input_ids"]
    ids += [task.tokenizer.convert_tokens_to_ids(c) for c in "/answer"]
    text = torch.tensor([*ids, task.tokenizer.convert_tokens_to_ids(token)])
    assert task.tokenizer.decode(text).endswith(f"{answer}</answer>\n")
    assert task.reward(asked, [text]) == [pytest.approx(1.2)]
    assert set(task.stops) < set(config.eos_id)


def test_shots_are_solved_questions_that_are_not_asked(tmp_path):
    data, asked = like_gsm8k(tmp_path), []
    # What `few_shot` makes, seen where the task takes it.
    made = TextProblems.__post_init__

    def noted(self):
        asked.extend(self.rows)
        made(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextProblems, "__post_init__", noted)
        model = without_template(tmp_path / "no chat")
        given = "--model", model, "--data", data, "--out", tmp_path / "a", "--shots", 2
        recipe_lines.run(NAME, *TINY, *given)
    first, second, third = (
        json.loads(line) for line in open(data, encoding="utf-8").readlines()[:3]
    )
    prompt = asked[0]["prompt"]
    for row in (first, second):
        thought, answer = row["answer"].split("\n#### ")
        solved = f"<think>{thought}</think><answer>{answer}</answer>\n"
        assert f"Q: {row['question']}\nA: {solved}" in prompt
    assert prompt.endswith(f"Q: {third['question']}\nA:") and prompt.count("A:") == 3
    assert len(asked) == 72 - 2  # of 80 every tenth is held out
    assert asked[0]["answer"] == third["answer"].split("#### ")[1]


def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path, capsys, monkeypatch):
    def given(folder):
        return ("--smoke", "--data", data, "--steps", 3, "--out", tmp_path / folder)

    data, draw, drawn = like_gsm8k(tmp_path), TextProblems.prompts, []
    recipe_lines.run(NAME, *given("whole"))

    def stops(self, n, generator):
        drawn.append(n)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return draw(self, n, generator)

    monkeypatch.setattr(TextProblems, "prompts", stops)
    said = recipe_lines.fails(NAME, *given("parts"), capsys=capsys, code=130)
    assert said == "interrupted: the same command goes on from the last checkpoint"
    assert not (tmp_path / "parts" / "model").exists()
    recipe_lines.run(NAME, *given("parts"))
    logs = [logged(tmp_path / folder) for folder in ("whole", "parts")]
    for line in logs[0] + logs[1]:
        assert float(line.pop("seconds")) > 0
    assert logs[0] == logs[1] and [line["step"] for line in logs[0]] == ["1", "2", "3"]
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(v, load_policy(SMALL)[0].state_dict()[k]) for k, v in first.items())


def test_a_run_that_never_earns_a_reward_goes_to_its_end_and_changes_nothing(tmp_path, monkeypatch):
    for name in ("minigrpo.text.prompts.answer_reward", "minigrpo.text.shots.tags_reward"):
        monkeypatch.setattr(name, lambda prompts, completions, **columns: [0.0] * len(prompts))
    recipe_lines.run(NAME, "--smoke", "--kl", 0, "--out", tmp_path)
    for line in logged(tmp_path):
        assert float(line["reward"]) == float(line["grad_norm"]) == float(line["loss"]) == 0
        assert float(line["frac_reward_zero_std"]) == 1
    before, after = load_policy(SMALL)[0].state_dict(), weights(tmp_path)
    assert len(logged(tmp_path)) == 2 and all(torch.equal(before[k], after[k]) for k in before)


def test_a_run_that_was_killed_goes_on(tmp_path):
    given = "--smoke", "--steps", 10**6, "--out", tmp_path, "--data", like_gsm8k(tmp_path)
    command = [sys.executable, recipe_lines.RECIPES / NAME, *given]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 120
        while not (tmp_path / "checkpoint.pt").exists() and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    done = torch.load(tmp_path / "checkpoint.pt")["step"]
    given = [done + 1 if value == 10**6 else value for value in given]
    recipe_lines.run(NAME, *given)
    assert [int(line["step"]) for line in logged(tmp_path)] == [*range(1, done + 2)]
    assert weights(tmp_path)


def test_a_data_set_is_loaded_by_its_name(tmp_path, capsys, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in open(like_gsm8k(tmp_path), encoding="utf-8")]
    asked = []

    def load_dataset(name, config=None, *, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list(rows[:60] if split == "train" else rows[60:])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    recipe_lines.run(NAME, *TINY, "--model", SMALL, "--out", tmp_path / "a")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    monkeypatch.undo()
    folder = tmp_path / "set"
    folder.mkdir()
    for split, some in (("train", rows[:60]), ("test", rows[60:])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    recipe_lines.run(NAME, *TINY, "--model", SMALL, "--data", folder, "--out", tmp_path / "b")
    given = *TINY, "--model", SMALL, "--data", "no-one/nothing", "--out", tmp_path / "c"
    said = recipe_lines.fails(NAME, *given, capsys=capsys)
    assert said.startswith("error: no-one/nothing: expected a .json, .jsonl, .csv, .parquet file")
