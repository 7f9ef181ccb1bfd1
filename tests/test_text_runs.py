"""The runs behind notebook 09: what is stored is what the settings say."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import text_runs  # noqa: E402


def test_every_run_is_stored_with_the_present_settings():
    """A change of settings, code or base models empties the file until it is run again."""
    assert [text_runs.name(one) for one in text_runs.stored()] == text_runs.RUNS
    for one in text_runs.stored():
        steps = text_runs.ARMS[one["arm"]].steps
        assert one["curve"]["step"] == list(range(0, steps + 1, 5))


def test_runs_of_other_settings_are_not_taken_for_stored(tmp_path, monkeypatch):
    changed = json.loads(text_runs.PATH.read_text("utf-8"))
    changed["settings"]["config"]["group_size"] = 4
    (tmp_path / "text.json").write_text(json.dumps(changed), "utf-8")
    monkeypatch.setattr(text_runs, "PATH", tmp_path / "text.json")
    assert text_runs.stored() == []


def paid_twice(prompts, completions, **columns):
    return [0.2 for _ in completions]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROBLEMS", 1000),
        ("PROBLEMS_SEED", 2),
        ("HELD_OUT", 64),
        ("HELD_OUT_SEED", 6),
        ("ARMS", {**text_runs.ARMS, "llama": text_runs.Arm("llama", weights=(1.0, 1.0))}),
        ("config", lambda *_: text_runs.GRPOConfig(lr=2e-4)),
        ("soft_reward", paid_twice),
        ("draw_rows", lambda *_, **__: [{"prompt": "6 + 3", "answer": "9"}]),
    ],
)
def test_a_changed_setting_is_noticed(name, value, monkeypatch):
    text_runs.drawn.cache_clear()
    monkeypatch.setattr(text_runs, name, value)
    try:
        assert text_runs.stored() == []
    finally:
        text_runs.drawn.cache_clear()


def test_another_chat_template_is_noticed(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "data" / "text_gpt2", tmp_path / "data" / "text_gpt2")
    shutil.copytree(ROOT / "data" / "text_llama", tmp_path / "data" / "text_llama")
    monkeypatch.setattr(text_runs, "ROOT", tmp_path)
    assert len(text_runs.stored()) == len(text_runs.RUNS)
    with (tmp_path / "data" / "text_gpt2" / "chat_template.jinja").open("a") as file:
        file.write("?")
    assert text_runs.stored() == []


def test_what_the_notebook_says_of_all_six_runs():
    plain = [one for one in text_runs.stored() if one["arm"] in text_runs.FAMILIES]
    assert len(plain) == 6
    for one in plain:
        form, right, length = (one["curve"][name] for name in text_runs.SCORES)
        assert form[0] < 0.65 and form[-1] > 0.9
        assert right[0] < 0.4 and right[-1] > 0.85
        assert length[-1] > length[0] + 4


def test_a_run_is_what_its_name_says():
    config = text_runs.config(text_runs.Arm("gpt2", steps=7), 5, (0,), 1)
    assert (config.steps, config.seed) == (7, 5)
    rewards = {name: function.__name__ for name, function in text_runs.REWARDS.items()}
    assert rewards == {"form": "format_reward", "answer": "answer_reward", "tags": "soft_reward"}


@pytest.mark.parametrize(("arm", "steps"), [("llama", 5), ("chat, answer", 1)])
def test_a_run_begins_as_the_stored_one_did(arm, steps, monkeypatch):
    """What ships is careless, and five steps of reward make it more careful."""
    (then,) = (r["curve"] for r in text_runs.stored() if text_runs.name(r) == (arm, 0))
    monkeypatch.setitem(text_runs.ARMS, arm, replace(text_runs.ARMS[arm], steps=steps))
    found = text_runs.measure(text_runs.Run(arm, 0))["curve"]
    assert found["step"] == [0, steps]
    for name in text_runs.SCORES:
        assert found[name][0] == pytest.approx(then[name][0], abs=0.01)
    for name in ("form", "right") if steps == then["step"][1] else ():
        assert found[name][1] == pytest.approx(then[name][1], abs=0.06)
        assert found[name][1] > found[name][0] + 0.07


def test_the_soft_reward_counts_tags_that_occur_once():
    texts = ["<think>6 + 3 = 9</think> <answer>9</answer>", "<answer>9</answer><answer>", "9"]
    assert text_runs.soft_reward(texts, texts) == pytest.approx([0.4, 0.1, 0.0])
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert text_runs.soft_reward(chats, chats) == pytest.approx([0.4, 0.1, 0.0])


def test_a_chat_asks_the_same_and_is_almost_never_right():
    policy, tokenizer = text_runs.base("gpt2")
    assert next(policy.parameters()).dtype == torch.float32
    chats, plain = (text_runs.scores(policy, tokenizer, chat=chat) for chat in (True, False))
    assert chats["right"] < 0.05 < plain["right"]
    for one in text_runs.stored()[:3]:  # those of gpt2
        for name in text_runs.SCORES:
            assert one["curve"][name][0] == pytest.approx(plain[name], abs=0.01)
    row = {"prompt": "Ben has 6 stamps. How many?\n", "answer": "6"}
    said = [{"role": "user", "content": "Ben has 6 stamps. How many?"}]
    assert text_runs.asked(row, chat=True) == {"prompt": said, "answer": "6"}


def test_a_run_is_measured_saved_and_not_repeated(tmp_path, monkeypatch, capsys):
    runs, settings = text_runs.stored(), text_runs.settings()
    monkeypatch.setattr(text_runs, "PATH", tmp_path / "text.json")
    monkeypatch.setattr(text_runs, "settings", lambda: settings)  # which `measure` is part of
    text_runs.save(runs[1:])
    monkeypatch.setattr(text_runs, "measure", lambda one: {**runs[0], "seed": one.seed})
    text_runs.main([])
    assert text_runs.stored() == runs
    assert capsys.readouterr().out == "gpt2 0 right 0.90\n"


def test_soft_tags_bring_the_form_and_no_answers():
    """What notebook 09 says of the runs in which almost no answer is right at first."""
    last = {arm: [] for arm in text_runs.ARMS}
    for one in text_runs.stored():
        last[one["arm"]].append({name: values[-1] for name, values in one["curve"].items()})
    alone, soft = last["chat, answer"], last["chat, answer and tags"]
    assert min(run["form"] for run in soft) > max(run["form"] for run in alone) > 0.8
    assert all(run["right"] < 0.1 and 7 <= run["length"] < 8 for run in alone + soft)
