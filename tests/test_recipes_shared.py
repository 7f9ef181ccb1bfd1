"""What the recipes share: rows of data, memory, held-out questions, a log, errors in a sentence."""

import csv
import json
import math
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import recipe_lines
import torch
from huggingface_hub import constants
from support import saved_bytes
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from minigrpo.files import data_folder
from minigrpo.text.models import kept, load_pretrained, memory
from minigrpo.text.problems import draw_rows
from minigrpo.text.prompts import answer_reward, write

running = recipe_lines.load("running")
gsm8k_rows = recipe_lines.load("gsm8k").gsm8k_rows
load_config, load_rows, plain_errors = running.load_config, running.load_rows, running.plain_errors
CsvLog, free_memory = running.CsvLog, running.free_memory
held_out = running.held_out
ROWS = [{"question": f"{i} + {i}?", "answer": str(2 * i), "note": "a, b"} for i in range(25)]
SIZES = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
LLAMA = LlamaConfig(**SIZES, vocab_size=100, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def written(path):
    if path.suffix == ".json":
        path.write_text(json.dumps(ROWS), encoding="utf-8-sig")
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n", encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:  # as Excel writes it
            table = csv.DictWriter(file, ROWS[0])
            table.writeheader()
            table.writerows(ROWS)
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv", ".parquet"])
def test_a_file_has_both_sides_of_the_split(tmp_path, ending):
    file = written(tmp_path / f"rows{ending}")
    train, test = (load_rows(file, split, ("question", "answer")) for split in ("train", "test"))
    assert test == [ROWS[9], ROWS[19]]
    assert train == [row for row in ROWS if row not in test]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"q": "1?", "answer": "1"}', "expected the columns question, found q, answer"),
        ('{"text": "1?"}', "expected the columns question and answer, found text"),
        ('{"question": "1?", "answer": null}', "expected answer in every row, got"),
        ('{"question": "1?", "answer": "1"}\n{"question": "2?"}', "columns answer, found question"),
        ("", "columns question and answer, found no rows in train (every tenth"),
        ('{"question": "1?", "answer": ""}', "expected answer in every row, got {'question': '1?'"),
        ('{"question": 1}\n7', "expected a .json, .jsonl, .csv, .parquet file, or"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, text, said):
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="rows.jsonl: ") as error:
        load_rows(file, "train", ("question", "answer"))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_file_is_read_by_its_ending_alone(tmp_path):
    (file := tmp_path / "rows.txt").write_text("1 + 1?")
    with pytest.raises(ValueError, match="rows.txt: expected a .json, .*, got the ending '.txt'"):
        load_rows(file, "train", ("question",))


@pytest.mark.parametrize("answer", ["because", "72 ####", 72, "#### "])
def test_an_answer_without_its_marks_is_refused_and_shown(tmp_path, answer):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "1?", "answer": answer}) + "\n")
    with pytest.raises(ValueError, match=f"expected answers that end in .* got '{answer}'"):
        gsm8k_rows(file, "train")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    copy = SimpleNamespace(HF_HUB_OFFLINE=False)  # that the datasets library keeps
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(config=copy))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked, hung, woke = [], threading.Event(), []

    def refuse():
        asked.append(1)
        raise ConnectionError("no network")

    with pytest.raises(ValueError, match="--model no-one/nothing: expected a model's folder or"):
        monkeypatch.setattr(running, "get_session", refuse)
        load_config("no-one/nothing")
    assert asked == [1] and copy.HF_HUB_OFFLINE
    assert constants.HF_HUB_OFFLINE

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(running, "get_session", lambda: woke.append(hung.wait(600)))
    running.ask_the_hub(seconds=0.1)  # whatever it hangs in
    assert constants.HF_HUB_OFFLINE and not woke
    hung.set()


def test_a_model_that_writes_no_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match="got t5, which is no causal language model"):
        load_config(str(tmp_path))


def test_a_chat_template_that_knows_no_system_is_named():
    tokenizer = load_pretrained(data_folder() / "text_llama", device="cpu")[1]
    running.check_chat(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match="refuses a system message .System role.*; pass --templ"):
        running.check_chat(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template.*; pass --template FILE .* instead"):
        running.check_chat(tokenizer)


def test_a_folder_keeps_to_one_run(tmp_path):
    def same(**settings):
        running.check_same_run(running.argparse.Namespace(out=str(tmp_path), **settings))

    same(lr=1, steps=5, model="a")
    same(lr=1, steps=9, model="a")  # longer
    with pytest.raises(ValueError, match="the run there has lr = 1, and this one 2: take another"):
        same(lr=2, steps=5, model="a")
    with pytest.raises(ValueError, match="has model = 'a', and this one None"):
        same(lr=1, steps=5)  # another recipe
    assert json.loads((tmp_path / "settings.json").read_text()) == {"lr": 1, "model": "a"}


@pytest.fixture
def heard():
    """Ctrl-C as at a terminal, also where whoever tests ignores it (nohup, or & in a script)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_second_request_to_stop_is_no_request(heard, capsys):
    with running.Stop() as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGINT)
        assert stop.asked and "finishing this step" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="a/b: reading it needs pip install datasets"):
        load_rows("a/b", "train", ("question",))


def test_a_data_set_is_loaded_by_its_name_or_its_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked, columns = [], ("question", "answer")

    def load_dataset(name, config=None, *, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list(ROWS)

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load_dataset)
        patch.setattr(running, "ask_the_hub", lambda: asked.append("the hub"))
        assert load_rows("some/set", "train", columns, config="main") == ROWS
    assert asked == ["the hub", ("some/set", "main", "train")]
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in (("train", ROWS[:20]), ("test", ROWS[20:])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    assert load_rows(folder, "test", columns, config="main") == ROWS[20:]
    with pytest.raises(ValueError, match="no-one/nothing: expected a .json, .jsonl, .csv, .parq"):
        load_rows("no-one/nothing", "train", columns)


def test_memory_by_hand():
    V, C, inner = 100, 8, 16
    # embedding and head, attention, MLP, norms
    count = 2 * V * C + 4 * C * C + 3 * C * inner + 3 * C
    needs = memory(LLAMA, rows=4, tokens=10, reference=True)
    assert needs["weights"] + needs["gradients and averages"] == 16 * count
    assert needs["reference"] == 4 * count and needs["logits"] == 3 * 4 * 4 * 10 * V
    assert sum(memory(LLAMA, rows=4, tokens=10).values()) == 16 * count + needs["logits"]
    tied = LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": True})
    assert memory(tied, rows=1, tokens=1)["weights"] == 4 * (count - V * C)


def test_cards_divide_what_their_stage_says():
    whole = memory(LLAMA, rows=1, tokens=1, reference=True)
    count = whole["weights"] // 4
    by = [memory(LLAMA, rows=1, tokens=1, reference=True, cards=4, stage=s) for s in range(4)]
    assert by[0] == whole and [n["logits"] for n in by] == [whole["logits"]] * 4
    found = [n["gradients and averages"] / count for n in by]
    assert found == pytest.approx([12, 4 + 2, 1 + 2, 1 + 2], abs=0.01)
    assert [n["weights"] // count for n in by] == [n["reference"] // count for n in by]
    assert [n["weights"] / count for n in by] == pytest.approx([4, 4, 4, 1], abs=0.01)
    tiles = [memory(LLAMA, rows=n, tokens=4096, tiles=True)["logits"] for n in (1, 9)]
    assert tiles == [4 * 4096 * 100] * 2


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
def test_the_activations_are_those_that_hooks_count(config):
    shape = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, vocab_size=100)

    def found(layers: int, rows: int) -> int:
        """Bytes that the backward pass needs, beside the weights."""
        config_ = config(**shape, num_key_value_heads=2, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config_)
        with saved_bytes() as sizes:
            with torch.autocast("cpu", torch.bfloat16):
                model.model(torch.zeros(rows, 50, dtype=torch.long), use_cache=False)
        weights = {p.data_ptr() for p in model.parameters()}
        return sum(size for at, size in sizes.items() if at not in weights)

    one = found(2, 2) - found(2, 1) - (found(1, 2) - found(1, 1))  # a row more, in a layer
    llama = config(**shape, num_key_value_heads=2, num_hidden_layers=3)
    assert kept(llama, 50, checkpointing=False) == 3 * one
    assert kept(llama, 50, checkpointing=True) == one + 3 * 50 * 4 * 64


def test_the_longest_prompt_and_a_completion_fill_the_room_and_no_more():
    tokenizer = load_pretrained(data_folder() / "text_llama", device="cpu")[1]
    prompts = ("How many?", "How many pens does Ann have now?", "Why?")
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    config = LlamaConfig(**LLAMA.to_dict() | {"max_position_embeddings": longest + 5})
    rows = [{"prompt": prompt} for prompt in prompts]
    assert running.check_room(config, tokenizer, rows, 5) == longest + 5
    said = f"--tokens 6: the longest prompt has {longest}, .* room for {longest + 5} in all"
    with pytest.raises(ValueError, match=said):
        running.check_room(config, tokenizer, rows, 6)


def test_free_memory_is_the_machines_the_containers_or_unknown(monkeypatch):
    free, read, limit = free_memory("cpu"), Path.read_text, ["12345678\n"]
    given = lambda self: limit[0] if self.name == "memory.max" else read(self)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", given)
    assert free_memory("cpu") == 12345678
    limit[0] = "max"
    assert 2**26 < free_memory("cpu") < 2**45
    monkeypatch.setattr(Path, "read_text", lambda self: Path("/nowhere").open())  # no /proc
    assert free_memory("cpu") == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >= free
    monkeypatch.delattr(os, "sysconf")  # as on Windows, where nothing is known
    assert free_memory("cpu") == sys.maxsize


def test_held_out_questions_are_answered_greedily(monkeypatch):
    policy, tokenizer = load_pretrained(data_folder() / "text_llama", device="cpu")
    rows = draw_rows(10, torch.Generator().manual_seed(0), held_out=True)
    rows[:3] = [{**row, "answer": "no number"} for row in rows[:3]]
    found = held_out(policy, tokenizer, rows)
    monkeypatch.setattr(running, "AT_ONCE", 4)
    assert found == held_out(policy, tokenizer, rows)
    p = found["right"]
    assert 0 < p < found["form"] <= 1 and found["questions"] == 10
    assert found["error"] == math.sqrt(p * (1 - p) / 10)
    prompts, answers = ([row[name] for row in rows] for name in ("prompt", "answer"))
    texts = write(policy, tokenizer, prompts, top_k=1)[1]
    assert p == sum(answer_reward(prompts, texts, answer=answers)) / 10
    rows = [{**row, "answer": "no number"} for row in rows]
    assert held_out(policy, tokenizer, rows)["right"] == 0


def read(path):
    return [*csv.DictReader(path.open(encoding="utf-8"))]


def test_a_log_has_one_line_per_step_whatever_stops_the_run(tmp_path):
    log = CsvLog(tmp_path / "run" / "log.csv")
    for step in (1, 2, 3):
        log.add(step, reward=step / 4, kl=None)
    assert read(log.path)[-1] == {"step": "3", "reward": "0.75", "kl": ""}
    again = CsvLog(log.path)  # from a checkpoint after step 1
    again.add(2, reward=5, held_out=0.5)
    told = [(line["step"], line["reward"], line["held_out"]) for line in read(log.path)]
    assert told == [("1", "0.25", ""), ("2", "5", "0.5")]
    assert [path.name for path in log.path.parent.iterdir()] == ["log.csv"]


def test_what_is_interrupted_while_it_is_written_is_there_as_before_or_not_at_all(
    tmp_path, monkeypatch
):
    def half(self, *rows):
        raise KeyboardInterrupt

    log = CsvLog(tmp_path / "log.csv")
    log.add(1, reward=0.5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(csv.DictWriter, "writerows", half)
        log.add(2, reward=0.75)
    assert [line["step"] for line in read(log.path)] == ["1"]

    def part(self, text, **given):
        self.write_bytes(text[:3].encode())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", part)
        running.stored(tmp_path / "before.json", lambda: {"right": 0.5})
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
    assert running.stored(tmp_path / "before.json", lambda: {"right": 0.25}) == {"right": 0.25}
    assert running.stored(tmp_path / "before.json", half) == {"right": 0.25}  # it isn't asked again


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("this is wrong"), 2, "error: this is wrong"),
        (MemoryError("so little"), 2, "error: so little"),
        (OSError("no file"), 2, "error: no file"),
        (ImportError("TRL is not installed"), 2, "error: TRL is not installed"),
        (torch.OutOfMemoryError("CUDA out of memory\nmore"), 2, "error: take fewer rows in one"),
        (KeyboardInterrupt(), 130, "interrupted: with a checkpoint, the same command goes on"),
    ],
)
def test_what_a_person_can_mend_is_one_sentence(capsys, error, code, said):
    with pytest.raises(SystemExit) as ended, plain_errors():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(said)


def test_kill_is_an_interruption_and_a_bug_keeps_its_traceback(capsys):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended, plain_errors():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ended.value.code == 130 and "interrupted" in capsys.readouterr().err
    with pytest.raises(KeyError), plain_errors():
        raise KeyError("a bug")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
