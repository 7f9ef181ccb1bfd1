"""GSM8K as the parquet files that verl reads: train.parquet and test.parquet.

python recipes/verl_gsm8k/make_data.py --out runs/verl_gsm8k/data
python recipes/verl_gsm8k/make_data.py --smoke     # 8 rows, and the reward of three answers to each

Columns as verl 0.9.1 has them (verl/utils/dataset/rl_dataset.py and the reward manager "naive"):
prompt, a chat; data_source; reward_model, of which `ground_truth` reaches the reward function; and
extra_info.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

# The recipes' own files, which find the course without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gsm8k import HUB, gsm8k_rows, like_gsm8k
from running import check_overlap, count, plain_errors

from minigrpo.files import atomic_path

REWARD = Path(__file__).with_name("reward.py")


def verl_row(row: dict, split: str, index: int) -> dict:
    """A question in verl's columns."""
    return {
        "data_source": HUB,
        "prompt": row["prompt"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"split": split, "index": index},
    }


def write(data: str, out: Path, rows: int | None, questions: int) -> None:
    """Both files, each in one piece."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    sides = {split: gsm8k_rows(data, split) for split in ("train", "test")}
    sides["train"] = check_overlap(sides["train"], sides["test"], data)
    for split, most in (("train", rows), ("test", questions)):
        table = [verl_row(row, split, i) for i, row in enumerate(sides[split][:most])]
        with atomic_path(out / f"{split}.parquet") as file:
            Dataset.from_list(table).to_parquet(str(file))
        print(f"{out / split}.parquet: {len(table)} rows")


def smoke(out: Path) -> None:
    """Read the training rows and call the reward function, both as verl does."""
    from datasets import load_dataset

    write(like_gsm8k(out, n=10), out, rows=8, questions=1)
    file = str(out / "train.parquet")
    rows = load_dataset("parquet", data_files=file, cache_dir=str(out / "cache"))["train"]
    spec = importlib.util.spec_from_file_location("custom_module", REWARD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for row in rows:
        right = row["reward_model"]["ground_truth"]
        answers = [f"<think>so</think><answer>{text}</answer>" for text in (right, right + "0")]
        scores = [
            module.compute_score(
                data_source=row["data_source"],
                solution_str=text,  # decoded without special tokens
                ground_truth=right,
                extra_info={**row["extra_info"], "num_turns": None, "rollout_reward_scores": {}},
            )
            for text in (*answers, f"It is {right}.")
        ]
        print(row["prompt"][-1]["content"], [round(score["score"], 3) for score in scores])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default=HUB, help="on the hub, or a file")
    parser.add_argument("--out", default="runs/verl_gsm8k/data", help="for the two files")
    parser.add_argument("--rows", type=count, help="for training [all of them]")
    parser.add_argument("--questions", type=count, default=200, help="held out, in test.parquet")
    parser.add_argument("--smoke", action="store_true", help="8 rows made here, and their rewards")
    o = parser.parse_args(arguments)
    with plain_errors(), tempfile.TemporaryDirectory() as folder:
        smoke(Path(folder)) if o.smoke else write(o.data, Path(o.out), o.rows, o.questions)


if __name__ == "__main__":
    main()
