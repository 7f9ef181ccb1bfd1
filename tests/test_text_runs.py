"""The runs behind notebook 09: what is stored is what the settings say."""

import json
import shutil
import sys
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


def test_an_interrupted_write_leaves_what_was_stored(tmp_path, monkeypatch):
    path = tmp_path / "text.json"
    path.write_text("what was stored")
    monkeypatch.setattr(text_runs, "PATH", path)

    def half(self, *text):
        self.write_bytes(b"{")
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        text_runs.save([])
    assert path.read_text() == "what was stored" and [*tmp_path.iterdir()] == [path]


def test_what_the_notebook_says_of_all_six_runs():
    plain = [one for one in text_runs.stored() if one["arm"] in text_runs.FAMILIES]
    assert len(plain) == 6
    for one in plain:
        form, right, length = (one["curve"][name] for name in text_runs.SCORES)
        assert form[0] < 0.65 and form[-1] > 0.9
        assert right[0] < 0.4 and right[-1] > 0.85
        assert length[-1] > length[0] + 4


@pytest.mark.parametrize("family", text_runs.FAMILIES)
def test_a_stored_run_begins_at_what_ships(family):
    policy, tokenizer = text_runs.base(family)
    assert next(policy.parameters()).dtype == torch.float32
    found = text_runs.evaluate(policy, tokenizer)
    for one in text_runs.stored():
        if one["arm"] == family:
            for name in text_runs.SCORES:
                assert one["curve"][name][0] == pytest.approx(found[name], abs=0.01)


def test_the_soft_reward_counts_tags_that_occur_once():
    texts = ["<think>6 + 3 = 9</think> <answer>9</answer>", "<answer>9</answer><answer>", "9"]
    assert text_runs.soft_reward(texts, texts) == pytest.approx([0.4, 0.1, 0.0])
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert text_runs.soft_reward(chats, chats) == pytest.approx([0.4, 0.1, 0.0])


def test_a_chat_asks_the_same_and_is_almost_never_right():
    policy, tokenizer = text_runs.base("gpt2")
    found = text_runs.scores(policy, tokenizer, chat=True)
    assert found["right"] < 0.05 < text_runs.scores(policy, tokenizer, chat=False)["right"]
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
