"""GSM8K as the jsonl files that OpenRLHF reads: train.jsonl and test.jsonl.

python recipes/openrlhf_gsm8k/make_data.py --out runs/openrlhf_gsm8k/data
python recipes/openrlhf_gsm8k/make_data.py --smoke    # 8 rows, and the reward of three answers each

OpenRLHF 0.11.2 reads the columns that --data.input_key and --data.label_key name, and `datasource`
for the names of the held-out results. The label is a text that reaches the reward function, so it
carries the weights of the rewards too: its evaluation is the mean reward, and with no weight on the
form that is the fraction right.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

# The recipes' own files, which find the course without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gsm8k import HUB, gsm8k_rows, like_gsm8k
from running import check_overlap, count, plain_errors

from minigrpo.files import atomic_path, data_folder

REWARD = Path(__file__).with_name("reward.py")
WEIGHTS = {"train": {"form": 0.2, "right": 1.0}, "test": {"form": 0.0, "right": 1.0}}


def openrlhf_row(row: dict, split: str) -> dict:
    """A question in OpenRLHF's columns."""
    label = json.dumps({"answer": row["answer"], **WEIGHTS[split]})
    return {"prompt": row["prompt"], "label": label, "datasource": "gsm8k"}


def write(data: str, out: Path, rows: int, questions: int) -> None:
    """Both files, each in one piece."""
    sides = {split: gsm8k_rows(data, split) for split in ("train", "test")}
    sides["train"] = check_overlap(sides["train"], sides["test"], data)
    for split, most in (("train", rows), ("test", questions)):
        table = [openrlhf_row(row, split) for row in sides[split][:most]]
        with atomic_path(out / f"{split}.jsonl") as file:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table)
            file.write_text(text, encoding="utf-8")
        print(f"{out / split}.jsonl: {len(table)} rows")


def smoke(out: Path) -> None:
    """Read the training rows and call the reward function, both as OpenRLHF does."""
    from datasets import load_dataset

    write(like_gsm8k(out, n=10), out, rows=8, questions=1)
    file = str(out / "train.jsonl")
    rows = load_dataset("json", data_files=file, cache_dir=str(out / "cache"))["train"]
    tokenizer = AutoTokenizer.from_pretrained(data_folder() / "text_llama")
    spec = importlib.util.spec_from_file_location("reward_func", REWARD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tokenize=False, add_generation_prompt=True
        )
        right = json.loads(row["label"])["answer"]
        answers = [f"<think>so</think><answer>{text}</answer>" for text in (right, right + "0")]
        rewards = []
        for text in (*answers, f"It is {right}."):
            ids = tokenizer(prompt + text + tokenizer.eos_token, add_special_tokens=False)
            query = tokenizer.decode(ids["input_ids"], skip_special_tokens=False)
            answered = module.reward_func([query], [prompt], [row["label"]])  # one row at a time
            rewards.append(round(answered["rewards"].item(), 3))
        print(row["prompt"][-1]["content"], rewards)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default=HUB, help="on the hub, or a file")
    parser.add_argument("--out", default="runs/openrlhf_gsm8k/data", help="for the two files")
    parser.add_argument("--rows", type=count, default=3200, help="for training: 200 steps of 16")
    parser.add_argument("--questions", type=count, default=200, help="held out, in test.jsonl")
    parser.add_argument("--smoke", action="store_true", help="8 rows made here, and their rewards")
    o = parser.parse_args(arguments)
    with plain_errors(), tempfile.TemporaryDirectory() as folder:
        smoke(Path(folder)) if o.smoke else write(o.data, Path(o.out), o.rows, o.questions)


if __name__ == "__main__":
    main()
