"""What the recipes share: rows of data, memory, held-out questions, a log, errors in a sentence."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import sys

import pytest
import torch
from transformers import LlamaConfig

from minigrpo.files import data_folder
from minigrpo.text.models import load_policy
from minigrpo.text.problems import draw_rows
from minigrpo.text.recipes import (
    CsvLog,
    check_memory,
    free_memory,
    held_out,
    load_rows,
    memory,
    plain_errors,
)

ROWS = [{"question": f"{i} + {i}?", "answer": str(2 * i), "note": "a, b"} for i in range(25)]
LLAMA = LlamaConfig(
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    vocab_size=100,
    tie_word_embeddings=False,
)


def written(path):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n", encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, ROWS[0])
            table.writeheader()
            table.writerows(ROWS)
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
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
        ('{"question": "1?", "answer": null}', "expected the columns answer, found"),
        ('{"question": "1?", "answer": "1"}\n{"question": "2?"}', "columns answer, found question"),
        ("", "expected the columns question and answer, found no rows in train"),
        ("not json", "expected a .jsonl, .csv, .parquet file, or a data set that can be loaded"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, text, said):
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="rows.jsonl: ") as error:
        load_rows(file, "train", ("question", "answer"))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="a/b: reading it needs pip install datasets"):
        load_rows("a/b", "train", ("question",))


def test_memory_by_hand():
    V, C, inner = 100, 8, 16
    count = (
        2 * V * C + 4 * C * C + 3 * C * inner + 3 * C
    )  # embedding and head, attention, MLP, norms
    needs = memory(LLAMA, rows=4, tokens=10, reference=True)
    assert needs["weights"] + needs["gradients and averages"] == 16 * count
    assert needs["reference"] == 4 * count and needs["logits"] == 4 * 4 * 4 * 10 * V
    assert sum(memory(LLAMA, rows=4, tokens=10).values()) == 16 * count + needs["logits"]
    tied = LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": True})
    assert memory(tied, rows=1, tokens=1)["weights"] == 4 * (count - V * C)


def test_too_little_memory_is_said_before_a_weight_is_there():
    check_memory(LLAMA, device="cpu", rows=4, tokens=10)
    with pytest.raises(
        MemoryError, match=r"at least \d+.\d GiB \(.*logits \d+.\d\), and \d+.\d are"
    ):
        check_memory(LLAMA, device="cpu", rows=2**20, tokens=2**20)
    assert 2**26 < free_memory("cpu") < 2**45


def test_where_there_is_no_proc_all_of_the_memory_counts(monkeypatch):
    def refuse(path):
        raise FileNotFoundError(path)

    free = free_memory("cpu")
    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    assert free_memory("cpu") == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >= free


def test_held_out_questions_are_answered_greedily():
    policy, tokenizer = load_policy(data_folder() / "text_llama", device="cpu", dtype=torch.float32)
    rows = draw_rows(10, torch.Generator().manual_seed(0), held_out=True)
    rows[:3] = [{**row, "answer": "no number"} for row in rows[:3]]
    found = held_out(policy, tokenizer, rows, at_once=4)
    assert found == held_out(policy, tokenizer, rows, at_once=10)
    p = found["right"]
    assert 0 < p < found["form"] <= 1 and found["questions"] == 10
    assert found["error"] == math.sqrt(p * (1 - p) / 10)
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
    assert [(line["step"], line["reward"]) for line in read(log.path)] == [
        ("1", "0.25"),
        ("2", "5"),
    ]
    assert read(log.path)[1]["held_out"] == "0.5"
    assert [path.name for path in log.path.parent.iterdir()] == ["log.csv"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("this is wrong"), 2, "error: this is wrong"),
        (MemoryError("so little"), 2, "error: so little"),
        (torch.OutOfMemoryError("CUDA out of memory\nmore"), 2, "error: take fewer rows in one"),
        (KeyboardInterrupt(), 130, "interrupted: the same command goes on"),
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
