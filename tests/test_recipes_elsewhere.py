"""Recipes for verl and OpenRLHF: columns, rewards and launch lines. And the page about all."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import recipe_lines
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, Qwen3Config

from minigrpo.files import data_folder
from minigrpo.text.prompts import answer_reward
from minigrpo.text.shots import tags_reward

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
like_gsm8k = recipe_lines.load("gsm8k").like_gsm8k
FOLDERS = ("verl_gsm8k", "openrlhf_gsm8k")
RIGHT = "<think>4 * 3</think>\n<answer>12</answer>"
TEXTS = (RIGHT, RIGHT.replace("12", "13"), "<answer>12</answer>", f"So {RIGHT}", "12", "")


def load(folder: str, name: str):
    """A file by its path, as both libraries load the reward."""
    path = RECIPES / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def path_stays(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_smoke_run_calls_the_reward_as_the_library_would(folder, capsys):
    pytest.importorskip("datasets")
    load(folder, "make_data").main(["--smoke"])
    said = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("[1.2, 0.2, 0.0]") for line in said) == 8
    assert any("8 rows" in line for line in said)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_reward_finds_the_course_wherever_it_is_loaded(folder):
    load(folder, "reward")
    assert sys.path[0] == str(ROOT)


@pytest.mark.parametrize("folder", FOLDERS)
def test_data_that_is_not_like_gsm8k_is_a_sentence(folder, tmp_path, capsys):
    pytest.importorskip("datasets")
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"problem": "1 + 1", "answer": "#### 2"}) + "\n")
    with pytest.raises(SystemExit) as ended:
        load(folder, "make_data").main(["--data", str(file), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2 and "expected the columns question" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("option", ["--rows", "--questions"])
def test_a_number_of_rows_is_one_or_more(folder, option, tmp_path, capsys):
    with pytest.raises(SystemExit):  # -5 would leave out the last five
        load(folder, "make_data").main(["--data", like_gsm8k(tmp_path), option, "-5"])
    assert "expected a whole number of 1 or more, got '-5'" in capsys.readouterr().err


@pytest.mark.parametrize("option", "cards rows prompt tokens steps prompts group".split())
def test_a_plan_is_of_one_or_more(option, capsys):
    with pytest.raises(SystemExit):
        recipe_lines.load("memory").main(["Qwen2.5-7B", "--card", "80", f"--{option}", "-2"])
    assert "expected a whole number of 1 or more, got '-2'" in capsys.readouterr().err


def test_verl_gets_its_columns_and_the_courses_rewards(tmp_path):
    datasets = pytest.importorskip("datasets")
    arguments = ["--data", like_gsm8k(tmp_path), "--out", str(tmp_path), "--questions", "3"]
    load("verl_gsm8k", "make_data").main(arguments)
    rows = datasets.Dataset.from_parquet(str(tmp_path / "train.parquet"), cache_dir=str(tmp_path))
    assert len(rows) == 72 and len({row["extra_info"]["index"] for row in rows}) == 72
    columns = {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert set(rows[0]) == columns and rows[0]["prompt"][-1]["role"] == "user"
    test = datasets.Dataset.from_parquet(str(tmp_path / "test.parquet"), cache_dir=str(tmp_path))
    assert len(test) == 3 and test[0]["extra_info"]["split"] == "test"

    score = load("verl_gsm8k", "reward").compute_score
    for text in TEXTS:
        found = score(data_source="", solution_str=text, ground_truth="12", extra_info={}, more=1)
        right = answer_reward([""], [text], answer=["12"])[0]
        form = tags_reward([""], [text])[0]
        assert found == {"score": 0.2 * form + right, "acc": right, "form": form}
        assert all(isinstance(value, float) for value in found.values())


@pytest.fixture(scope="module")
def openrlhf():
    """Its reward for one completion, called as OpenRLHF does: one text, with special tokens."""
    reward = load("openrlhf_gsm8k", "reward").reward_func
    tokenizer = AutoTokenizer.from_pretrained(data_folder() / "text_llama")

    def call(text, end="<|endoftext|>", right="12", form=0.2, shown="", start=None):
        chat = [{"role": "user", "content": f"{shown}4 times 3?"}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer((prompt if start is None else start) + text + end)["input_ids"]
        query = tokenizer.decode(ids, skip_special_tokens=False)
        label = json.dumps({"answer": right, "form": form, "right": 1.0})
        found = reward([query], [prompt], [label])
        assert all(v.shape == (1,) for v in (found["rewards"], found["scores"]))
        assert found["scores"].item() == found["extra_logs"]["right"].item()  # what is filtered by
        return found["rewards"].item(), {k: v.item() for k, v in found["extra_logs"].items()}

    return call


def test_openrlhf_gets_the_courses_rewards_of_the_completion_alone(openrlhf):
    for text in TEXTS:
        for end in ("<|endoftext|>", "<|end|>\n<|endoftext|>", "</s>", ""):
            right = answer_reward([""], [text], answer=["12"])[0]
            form = tags_reward([""], [text])[0]
            total, logs = openrlhf(text, end)
            assert total == pytest.approx(0.2 * form + right)
            assert logs == {"right": right, "form": form, "lost": 0.0}
    assert openrlhf(RIGHT, form=0.0)[0] == 1.0 and openrlhf(TEXTS[1], form=0.0)[0] == 0.0
    assert openrlhf("no", shown=f"Like this: {RIGHT} ")[0] == 0.0  # an example isn't an answer
    assert openrlhf(RIGHT, shown=f"Like this: {RIGHT} ")[0] == pytest.approx(1.2)


def test_a_prompt_that_openrlhf_has_cut_is_counted_and_not_rewarded(openrlhf):
    total, logs = openrlhf(RIGHT, start="times 3?")
    assert total == 0.0 and logs["lost"] == 1.0


def test_openrlhf_gets_a_text_as_label_and_held_out_questions_without_the_form(tmp_path):
    arguments = ["--data", like_gsm8k(tmp_path), "--out", str(tmp_path), "--rows", "16"]
    load("openrlhf_gsm8k", "make_data").main(arguments)
    read = [
        [json.loads(line) for line in (tmp_path / f"{split}.jsonl").open()]
        for split in ("train", "test")
    ]
    assert [len(rows) for rows in read] == [16, 8]
    for rows, form in zip(read, (0.2, 0.0)):
        assert {json.loads(row["label"])["form"] for row in rows} == {form}
        assert all(set(row) == {"prompt", "label", "datasource"} for row in rows)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_launch_line_names_what_is_there(folder, tmp_path):
    script = RECIPES / folder / "launch.sh"
    assert script.stat().st_mode & 0o111
    # Run with a python that only writes down what it is called with.
    seen, fake = tmp_path / "seen", tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nfor a in "$@"; do echo "$a" >> "{seen}"; done\n')
    fake.chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    (out / "latest_checkpointed_iteration.txt").write_text("200")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(out), "GPUS": "2"}
    environment |= {"DATA": str(tmp_path / "data"), "MODEL": "a/model"}
    command = ["bash", str(script), "more=1"]
    subprocess.run(command, env=environment, check=True, cwd=tmp_path)
    called = seen.read_text().splitlines()
    assert called[0] == str(RECIPES / folder / "make_data.py") and "more=1" in called
    files = [Path(word.rpartition("=")[2]) for word in called if word.endswith(".py")]
    assert len(files) == 2 and all(file.is_file() for file in files)
    if folder == "verl_gsm8k":
        known = dict(word.split("=", 1) for word in called if "=" in word)
        assert known["algorithm.adv_estimator"] == "grpo"  # by itself it runs PPO
        assert known["data.train_batch_size"] == "16" and known["trainer.n_gpus_per_node"] == "2"
        batch = "actor_rollout_ref.actor.ppo_mini_batch_size"  # in questions too: one update
        assert known[batch] == known["data.train_batch_size"]
        assert "verl.model_merger" in called and f"{out}/global_step_200/actor" in called
    else:
        known = {a: b for a, b in zip(called, called[1:]) if a.startswith("--")}
        assert known["--algo.advantage.estimator"] == "group_norm"
        rows = int(known["--rollout.batch_size"]) * int(known["--rollout.n_samples_per_prompt"])
        assert int(known["--train.batch_size"]) == rows  # in completions: one update
        assert known["--vllm.num_engines"] == known["--actor.num_gpus_per_node"] == "2"


def test_the_page_has_every_recipe_and_the_table_that_the_command_prints(capsys):
    page = (RECIPES / "README.md").read_text(encoding="utf-8")
    recipes = {path.name for path in RECIPES.iterdir() if path.suffix == ".py" or path.is_dir()}
    for name in recipes - {"__pycache__", "gsm8k.py", "memory.py", "running.py"}:
        assert f"]({name})" in page, name
    recipe_lines.load("memory").main([])
    printed = capsys.readouterr().out
    place = page.partition("<!-- memory: begin -->\n")[2].partition("<!-- memory: end -->")
    assert place[0] == printed


def test_a_plan_adds_up_and_says_what_does_not_fit(capsys):
    memory = recipe_lines.load("memory")
    big = memory.SHAPES["Qwen2.5-7B"]
    cells = memory.line("big", big).strip("| ").split(" | ")
    assert cells[1] == "7,616 M" and cells[-1] == "14.2"  # 7.61B, says its card; in bfloat16
    assert float(cells[2]) == pytest.approx(16 * 7.616e9 / 2**30, rel=0.01)
    assert float(cells[3]) == pytest.approx(20 * 7.616e9 / 2**30, rel=0.01)
    for arguments, said in (
        ("--card 80", "No: that doesn't fit."),
        ("--card 80 --lora", "It fits by this count"),
        ("--card 80 --cards 4 --stage 3 --vllm 0.3", "vLLM has room for 258 completions"),
        ("--card 40 --lora --vllm 0.3", "No: vLLM's share doesn't hold its copy, 14.2 GiB."),
        (
            "--card 80 --lora --sampled 1000 --trained 4000 --price 2",
            "hours for 200 steps, 5.16 at",
        ),
        ("--card 80", "(a guess: nothing was measured)"),
    ):
        memory.main(["Qwen2.5-7B", *arguments.split()])
        assert said in capsys.readouterr().out, arguments


GROUPED = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "width"),  # of keys, of a layer
    [
        (GPT2Config(n_embd=48, n_head=4, n_layer=2), 48),
        (LlamaConfig(**GROUPED), 24),
        (Qwen3Config(**GROUPED, head_dim=32), 64),
    ],
    ids=lambda config: getattr(config, "model_type", ""),
)
def test_a_plan_knows_how_wide_the_keys_are(config, width):
    memory, sampling = recipe_lines.load("memory"), []
    for group in ("8", "9"):
        o = memory.options().parse_args(["--card", "80", "--prompts", "1", "--group", group])
        sampling.append(memory.plan(config, o)["sampling"])
    row = 2 * 4 * width * config.num_hidden_layers * 712  # keys and values in float32, 200 + 512
    assert sampling[1] - sampling[0] == row
