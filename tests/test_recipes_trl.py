"""The recipes on TRL: they run, stop, go on, and say in a sentence what is wrong."""

import csv
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import recipe_lines
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig

from minigrpo.files import data_folder
from minigrpo.text.models import load_pretrained
from minigrpo.text.prompts import answer_reward

ROOT = Path(__file__).resolve().parent.parent
gsm8k = recipe_lines.load("gsm8k")
SYSTEM, gsm8k_rows, like_gsm8k = gsm8k.SYSTEM, gsm8k.gsm8k_rows, gsm8k.like_gsm8k
MODEL = data_folder() / "text_llama"


@pytest.fixture(autouse=True)
def signals_stay():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def gsm8k_trl(monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return recipe_lines.load("gsm8k_trl")


@pytest.fixture
def countdown_trl(gsm8k_trl):
    return recipe_lines.load("countdown_trl")


def log(out: Path) -> list[dict[str, str]]:
    return [*csv.DictReader((out / "log.csv").open())]


def weights(folder: Path) -> torch.Tensor:
    return load_pretrained(folder, device="cpu")[0].get_input_embeddings().weight.detach()


def test_two_steps_of_gsm8k_leave_a_log_a_model_and_what_was_held_out(gsm8k_trl, tmp_path, capsys):
    gsm8k_trl.main(["--smoke", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "before: " in said and "after 2 steps: " in said and "8 held-out questions" in said
    assert "a right completion earns 1.2, a wrong one 0.2" in said
    step = "step 1  reward 0.525  frac_reward_zero_std 0.000  truncated 0.000  entropy 0.311"
    assert re.search(re.sub(r"\d\.\d+", r"\\d.\\d+", step) + r"  grad_norm 0\.\d+\n", said)
    rows = log(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2"]
    assert all(float(row["reward_std"]) > 0 and float(row["grad_norm"]) > 0 for row in rows)
    for row in rows:
        tags, right = (float(row[f"rewards/{name}_reward/mean"]) for name in ("tags", "answer"))
        assert float(row["reward"]) == pytest.approx(0.2 * tags + right, abs=1e-4)
    assert 0 < float(rows[0]["rewards/answer_reward/mean"]) < 1
    for name in ("before", "after_2_steps"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["questions"] == 8 and 0 <= found["right"] <= 1
    assert not torch.equal(weights(tmp_path / "model"), weights(MODEL))
    assert len([*(tmp_path / "completions").iterdir()]) == 2

    # The same command again takes no step, and another one is refused.
    trained = weights(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    gsm8k_trl.main(["--smoke", "--out", str(tmp_path)])
    assert log(tmp_path) == rows and torch.equal(weights(tmp_path / "model"), trained)
    says(gsm8k_trl, capsys, "the run there has lr = 1e-06", "--smoke", "--out", tmp_path, "--lr=1")
    # What is given outranks the defaults of a smoke run.
    gsm8k_trl.main(["--smoke", "--out", str(tmp_path), "--steps", "3"])
    assert [row["step"] for row in log(tmp_path)] == ["1", "2", "3"]


def test_a_run_that_is_stopped_saves_its_step_and_goes_on_as_if_it_had_not_been(
    gsm8k_trl, tmp_path, monkeypatch, capsys
):
    gsm8k_trl.main(["--smoke", "--out", str(tmp_path / "whole")])
    kills = [signal.SIGTERM]

    def tags_reward(prompts, completions, **columns):
        if kills and len(completions) > 2:  # not where a smoke run grades two by hand
            os.kill(os.getpid(), kills.pop())  # in the middle of the first step
        return plain(prompts, completions, **columns)

    plain = gsm8k_trl.tags_reward
    monkeypatch.setattr(gsm8k_trl, "tags_reward", tags_reward)
    command = ["--smoke", "--out", str(tmp_path / "stopped")]
    with pytest.raises(SystemExit) as ended:
        gsm8k_trl.main(command)
    assert ended.value.code == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert [row["step"] for row in log(tmp_path / "stopped")] == ["1"]
    assert (tmp_path / "stopped" / "checkpoint-1" / "trainer_state.json").exists()
    assert not (tmp_path / "stopped" / "model").exists()

    gsm8k_trl.main(command)
    said = capsys.readouterr().out
    assert "step 2  " in said and "step 1  " not in said
    known = ("step", "reward", "reward_std", "grad_norm", "entropy")
    rows = [[{k: row[k] for k in known} for row in log(tmp_path / n)] for n in ("whole", "stopped")]
    assert rows[0] == rows[1]
    assert torch.equal(*(weights(tmp_path / name / "model") for name in ("whole", "stopped")))


def test_a_checkpoint_that_was_not_finished_is_passed_over(gsm8k_trl, tmp_path, capsys):
    assert gsm8k_trl.newest_checkpoint(str(tmp_path)) == (0, None)
    states = [(step, f'{{"global_step": {step}}}') for step in (9, 10)]
    for step, text in (*states, (20, '{"global_st'), (100, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    assert gsm8k_trl.newest_checkpoint(str(tmp_path)) == (10, str(tmp_path / "checkpoint-10"))
    assert capsys.readouterr().err.count("was not finished") == 2


def says(module, capsys, *parts_and_arguments) -> None:
    """A command ends with code 2 and one line on stderr that holds the first argument."""
    part, *arguments = map(str, parts_and_arguments)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        module.main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and part in error
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.fixture
def base(tmp_path):
    """Arguments of a run that nothing is wrong with but its length."""
    data = like_gsm8k(tmp_path)
    return ["--data", data, "--model", MODEL, "--out", tmp_path / "run", "--tokens", 20]


def test_what_a_person_can_mend_is_said_before_any_weight_is_loaded(
    gsm8k_trl, base, tmp_path, monkeypatch, capsys
):
    def never(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    monkeypatch.setattr("trl.GRPOTrainer", never)
    missing, find_spec = ["peft", "vllm", "wandb", "trl"], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name)
    )
    for name in missing:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def wrong(part, *arguments):
        says(gsm8k_trl, capsys, part, *base, *arguments)

    monkeypatch.setattr("minigrpo.scaling.trl.find_spec", importlib.util.find_spec)
    wrong("TRL is not installed. It comes with the extra")
    missing.remove("trl")
    (tmp_path / "mine.py").write_text("few = lambda **columns: [1]\nraise_ = lambda: 1 / 0\n")
    wrong("expected file.py:function, found no such file", "--reward", "nowhere.py:one")
    wrong("got 1 numbers for 2 completions", "--reward", f"{tmp_path / 'mine.py'}:few")
    wrong("got TypeError: ", "--reward", f"{tmp_path / 'mine.py'}:raise_")
    wrong("--model ./nowhere: no such folder", "--model", "./nowhere")
    wrong("peft is not installed: pip install peft", "--lora")
    wrong("wandb is not installed: pip install wandb", "--log=wandb")
    wrong("vllm is not installed: pip install vllm", "--vllm")
    wrong("rows that divide into passes of 8", "--prompts=3", "--group=3")
    wrong("a group of 2 or more", "--prompts=8", "--group=1")
    wrong("has room for 128 in all", "--tokens=128")
    monkeypatch.setitem(sys.modules, "vllm", None)
    wrong("--vllm: expected a CUDA GPU, found none", "--vllm")

    file = tmp_path / "other.csv"
    file.write_text("problem,answer\nwhy,#### 1\n")
    wrong("expected the columns question, found problem, answer", "--data", file)
    file.write_text("question,answer\nwhy,because\n")
    wrong("expected answers that end in '#### number', got 'because'", "--data", file)

    file.write_text("question,answer\n" + "why,#### 1\nhow,#### 2\n" * 15)
    wrong("12 of 27 questions to learn from are held out, too: take out", "--data", file)

    plain = tmp_path / "plain"
    shutil.copytree(MODEL, plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(plain)
    wrong("no chat template, so it is no chat model; pass --template FILE", "--model", plain)

    monkeypatch.setattr(recipe_lines.load("running"), "free_memory", lambda device: 2**20)
    wrong("training needs at least 0.0 GiB", "--tokens=20")
    assert not (tmp_path / "run").exists()


def test_a_template_that_is_passed_takes_the_place_of_the_missing_one(gsm8k_trl, base, tmp_path):
    (shutil.copytree(MODEL, tmp_path / "plain") / "chat_template.jinja").unlink()
    given = [*base, "--model", tmp_path / "plain", "--prompts", 2, "--group", 4]
    given += ["--template", ROOT / "recipes" / "plain_chat.jinja"]
    o = gsm8k_trl.options("", data=None).parse_args([*map(str, given)])
    o.device = "cpu"
    _, tokenizer = gsm8k_trl.check(o)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    written = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert written == "System: Be kind.\nUser: Hi\nAssistant: "


def test_the_adapters_are_counted_without_a_weight(gsm8k_trl):
    llama = LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, vocab_size=50,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    per_layer = 2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16)  # q o, k v, gate up down
    assert gsm8k_trl.adapter_size(llama) == 32 * 2 * per_layer
    gpt2 = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50)
    assert gsm8k_trl.adapter_size(gpt2) == 32 * ((8 + 24) + (8 + 8) + 2 * (8 + 32))


def test_trl_knows_every_setting(gsm8k_trl, tmp_path):
    from trl import GRPOConfig

    given = ["--out", str(tmp_path), "--vllm", "--kl=0.3", "--seed=5", "--tokens=600", "--steps=40"]
    o = gsm8k_trl.options("", data=None).parse_args(given)
    o.device, o.lr = "cuda", 2e-6
    found = gsm8k_trl.settings(o, room=700)
    assert found.items() >= {
        "loss_type": "dapo", "epsilon": 0.2, "scale_rewards": "group", "num_generations": 8,
        "beta": 0.3, "learning_rate": 2e-6, "seed": 5, "max_completion_length": 600,
        "max_steps": 40, "warmup_steps": 10, "save_steps": 20, "max_grad_norm": 1.0,
    }.items()  # fmt: skip
    assert set(found) <= {field.name for field in dataclasses.fields(GRPOConfig)}
    rows = found["per_device_train_batch_size"] * found["gradient_accumulation_steps"]
    assert rows == o.prompts * o.group == 128
    assert found["use_vllm"] and found["vllm_max_model_length"] == 700
    assert found["vllm_importance_sampling_mode"] == "token_truncate"
    assert found["vllm_importance_sampling_clip_max"] == 2.0
    o.lora = True  # only then are the weights kept in bfloat16
    assert found["model_init_kwargs"] == {"dtype": "float32"}
    assert gsm8k_trl.settings(o, room=700)["model_init_kwargs"] == {"dtype": "bfloat16"}


def test_cards_that_divide_a_model_and_a_share_that_holds_its_copy(gsm8k_trl, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert gsm8k_trl.sharding() == {"cards": 4, "stage": 0}  # each has all of it
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    assert gsm8k_trl.sharding() == {"cards": 4, "stage": 2}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert gsm8k_trl.sharding() == {"cards": 4, "stage": 3}
    big = recipe_lines.load("memory").SHAPES["Qwen2.5-7B"]
    said = "--vllm-share 0.3: that is 12.0 GiB of this card, .* in bfloat16 takes 14.2: raise"
    with pytest.raises(ValueError, match=said):
        gsm8k_trl.check_share(big, 0.3, 40 * 2**30)
    assert gsm8k_trl.check_share(big, 0.5, 40 * 2**30) == 20 * 2**30


def test_a_model_is_asked_before_it_learns(gsm8k_trl, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def long(prompts, completions, kind, **columns):\n"
        "    assert {*kind} <= {'1 step', '2 steps', '3 steps'}\n"
        "    return [float(len(c[-1]['content']) > 30) for c in completions]\n"
    )
    out = ["--smoke", "--out", str(tmp_path / "run"), "--eval-every", "1"]
    gsm8k_trl.main([*out, "--ask"])
    found = json.loads((tmp_path / "run" / "ask.json").read_text())
    whole, kinds = found["all"], [one for kind, one in found.items() if kind != "all"]
    assert whole["questions"] == 16 == sum(kind["questions"] for kind in kinds)
    assert 0 < whole["pass@1"] < whole["pass@4"] <= 1 and 0 < whole["differ"] <= 1
    mean = sum(kind["questions"] * kind["pass@4"] for kind in kinds) / 16
    assert whole["pass@4"] == pytest.approx(mean)
    assert f"all, 16 questions: pass@1 {whole['pass@1']:.2f}, pass@4" in capsys.readouterr().out
    # Then with a reward of one's own, and held-out questions after every step.
    gsm8k_trl.main([*out[:2], str(tmp_path / "own"), *out[3:], f"--reward={tmp_path}/mine.py:long"])
    for row, step in zip(log(tmp_path / "own"), (1, 2), strict=True):
        assert 0 <= float(row["rewards/long/mean"]) <= 1
        told = json.loads((tmp_path / "own" / f"after_{step}_steps.json").read_text())
        assert float(row["held_out"]) == told["right"]


def test_a_bad_start_is_loud():
    running = recipe_lines.load("running")
    step = {"frac_reward_zero_std": 0.5, "completions/clipped_ratio": 1, "rewards/right/mean": 0}
    said = running.alarm([step] * 3, "rewards/right/mean")
    assert [what.split(":")[0] for what in said] == [
        "not one completion is right",
        "no completion ends",
    ]
    equal = {**step, "frac_reward_zero_std": 1}
    assert "all rewards are equal" in running.alarm([equal] * 3, "rewards/right/mean")[0]
    assert running.device_line("cpu").startswith("!!! There's no CUDA GPU")


def test_gsm8k_is_a_chat_and_the_number_behind_its_marks(tmp_path):
    file = tmp_path / "some.jsonl"
    row = {"question": "How many?", "answer": "Two #### and two.\n#### 1,234"}
    file.write_text((json.dumps(row) + "\n") * 20)
    train, test = gsm8k_rows(file, "train"), gsm8k_rows(file, "test")
    assert len(train) == 18 and len(test) == 2 and train[0]["answer"] == "1,234"
    assert [m["content"] for m in train[0]["prompt"]] == [SYSTEM, "How many?"]
    good = "<think>2 + 2</think><answer>1234</answer>"
    assert answer_reward([train[0]["prompt"]], [good], answer=["1,234"]) == [1.0]


def test_countdown_runs_on_the_same_trainer(countdown_trl, tmp_path, capsys):
    countdown_trl.main(["--smoke", "--out", str(tmp_path)])
    assert "after 2 steps: " in capsys.readouterr().out
    assert [row["step"] for row in log(tmp_path)] == ["1", "2"]
    assert "rewards/equation_reward/mean" in log(tmp_path)[0]
    arguments = ["--rows=100", "--numbers", "2", "--largest=4", "--out", tmp_path / "other"]
    says(countdown_trl, capsys, "--largest 4: expected 100 different questions", *arguments)
    arguments = ["--questions=1", "--rows=9", "--numbers", "1", "--out", tmp_path / "other"]
    says(countdown_trl, capsys, "expected 9 different questions, found 0", *arguments)
    file = tmp_path / "some.csv"
    file.write_text("numbers,target\n1,2\n")
    says(countdown_trl, capsys, "the columns nums, found numbers, target", "--data", file)
    file.write_text('nums,target\n"[3, 7]",x\n')
    says(countdown_trl, capsys, "expected nums like [3, 7, 25], a target, got", "--data", file)
    file.write_text('nums,target\n"[3, 7]",21\n')
    side = "held out" if not countdown_trl.is_held_out([3, 7]) else "trained on"
    says(countdown_trl, capsys, f"found none to be {side}", "--data", file)


def solvable(numbers: list[Fraction], target: int) -> bool:
    """By trying everything."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i != j:
                rest = [x for k, x in enumerate(numbers) if k not in (i, j)]
                made = [a + b, a - b, a * b] + ([a / b] if b else [])
                if any(solvable([*rest, x], target) for x in made):
                    return True
    return False


def test_every_countdown_can_be_solved_and_no_numbers_are_on_both_sides(countdown_trl):
    kind = {"counts": [3, 4], "largest": 20}
    train = countdown_trl.draw_rows(60, held_out=False, **kind)
    test = countdown_trl.draw_rows(30, held_out=True, **kind)
    sides = [{tuple(sorted(r["numbers"])) for r in rows} for rows in (train, test)]
    assert not sides[0] & sides[1]
    assert {len(r["numbers"]) for r in train} == {3, 4}
    for row in (*train[:20], *test[:10]):
        assert solvable([*map(Fraction, row["numbers"])], row["target"])
        assert str(row["target"]) in row["prompt"][-1]["content"]
    assert len({(*sorted(r["numbers"]), r["target"]) for r in train}) == 60
    assert countdown_trl.draw_rows(60, held_out=False, **kind) == train


def test_countdown_reads_a_data_set_and_splits_it_by_its_numbers(countdown_trl, tmp_path):
    rows = countdown_trl.draw_rows(50, held_out=False, counts=[3], largest=9)
    rows += countdown_trl.draw_rows(20, held_out=True, counts=[3], largest=9)
    as_list, as_text = tmp_path / "some.jsonl", tmp_path / "some.csv"
    lines = [{"nums": row["numbers"], "target": row["target"]} for row in rows]
    as_list.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with as_text.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["nums", "target"])
        writer.writeheader()
        writer.writerows(lines)
    for held_out in (False, True):
        found = countdown_trl.rows_from(str(as_list), held_out)
        assert found == countdown_trl.rows_from(str(as_text), held_out)
        assert found and all(row in rows for row in found)
        assert {countdown_trl.is_held_out(row["numbers"]) for row in found} == {held_out}


@pytest.mark.parametrize(
    "text, value, numbers",
    [
        ("(25 - 7) + 3", 21, [3, 7, 25]),
        ("1/3*3", 1, [1, 3, 3]),
        (" 7 ", 7, [7]),
        ("8 / (3 - 8 / 3)", 24, [3, 3, 8, 8]),  # floats would miss it
    ],
)
def test_an_expression_is_computed_exactly(countdown_trl, text, value, numbers):
    assert countdown_trl.evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "", "()", "1 +", "1 2", "-3", "+3", "2 ** 3", "7 // 2", "1 / 0", "1 / (2 - 2)", "1.5",
        "1e3",
        "1_000", "0x10", "(1).real", "[1]", "1,2", "True", "x", "2(3)", "007", "1 < 2",
        "1 if 1 else 2",
        "__import__('os')", "(lambda: 1)()", "9 ** 9 ** 9", "(" * 101,
        "(" * 49 + "1" + ")" * 49 + "+",
        "1" * 101, "1\n+ 2", "１ + ２",
    ],
)  # fmt: skip
def test_anything_else_is_no_expression(countdown_trl, text):
    assert countdown_trl.evaluate(text) is None


def test_an_equation_is_right_if_it_makes_the_target_of_each_number_once(countdown_trl):
    def reward(answer, numbers=(3, 7, 25), target=21, form="<think>so</think><answer>{}</answer>"):
        chat = [{"role": "assistant", "content": form.format(answer)}]
        columns = {"numbers": [list(numbers)], "target": [target]}
        return countdown_trl.equation_reward([[]], [chat], **columns)[0]

    right = ("25 - 7 + 3", "(25-7)+3", "3+25-7", "25 - 7 + 3 = 21", "25 − 7 + 3")
    assert [reward(text) for text in right] == [1.0] * len(right)
    assert reward("3 × (9 ÷ 3)", numbers=(3, 3, 9), target=9) == 1.0
    wrong = ("21", "25 - 7 + 4", "25 - 3 - 7", "25 - 7 + 3 + 3", "7 * 3", "25 - 7 + 3 = 22")
    wrong += ("25 - 7 + 3 = 21 = 21", "= 21", "21 = 25 - 7 + 3", "none", "")
    assert [reward(text) for text in wrong] == [0.0] * len(wrong)
    assert reward("25 - 7 + 3", form="{}") == 0.0
    assert reward("25 - 7 + 3", form="So <think>a</think><answer>{}</answer>") == 0.0
