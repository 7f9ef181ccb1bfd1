"""GRPO on GSM8K, grade-school word problems, with the loop of this course, `train_grpo`.

    python recipes/gsm8k_ours.py --smoke                              # seconds, CPU, no network
    python recipes/gsm8k_ours.py                                      # one GPU, all weights learn
    python recipes/gsm8k_ours.py --model FOLDER --data FILE.jsonl     # without a network
    python recipes/gsm8k_ours.py --model gpt2 --shots 3 --tokens 256  # a model that can't chat

Whatever stops a run, the same command goes on from its last checkpoint. To train on questions of
your own, give a file with the columns question and answer; an answer ends in `#### 72`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from running import (
    CsvLog,
    Stop,
    ask,
    check_chat,
    check_installed,
    check_memory,
    check_room,
    check_same_run,
    count,
    folder_of,
    held_out,
    save_model,
)

from minigrpo.files import data_folder
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.objective import VARIANTS
from minigrpo.parts import precision
from minigrpo.text.gsm8k import HUB, gsm8k_rows, like_gsm8k
from minigrpo.text.models import load_policy
from minigrpo.text.prompts import TextProblems, answer_reward, decode_completion, stop_tokens
from minigrpo.text.recipes import load_config, load_rows
from minigrpo.text.shots import line_ends, tags_reward

LOGGED = (  # of `StepMetrics`; the first five are those to watch
    "reward frac_reward_zero_std truncated entropy grad_norm "
    "mean_length kl clip_low clip_high ratio_min ratio_max loss seconds"
).split()


def options() -> argparse.ArgumentParser:
    """What can be set."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="a name on the hub, or a folder")
    add("--data", default=HUB, help="a data set on the hub, or a json, jsonl, csv, parquet file")
    add("--shots", type=int, help="plain text after so many solved questions, instead of a chat")
    add("--out", help="a folder for all files of the run [runs/gsm8k_ours]")
    add("--device", choices=("cuda", "cpu"), help="[cuda, if there is one]")
    add("--steps", type=count, default=200, help="batches of completions, and updates")
    add("--prompts", type=count, default=16, help="questions per step, P")
    add("--group", type=count, default=8, help="completions per question, G")
    add("--tokens", type=count, default=512, help="of a completion, at most")
    add("--rows-per-pass", type=count, default=4, help="rows scored at a time: memory, not results")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the arithmetic [bfloat16 on a GPU that has it]",
    )
    add("--checkpointing", action="store_true", help="compute activations twice, to keep fewer")
    add("--lr", type=float, default=1e-6, help="learning rate, constant")
    add("--kl", type=float, default=0.0, help="weight of the KL to the first policy, beta")
    add("--questions", type=count, default=200, help="held out, asked before and after")
    add("--save-every", type=count, default=20, help="steps between two checkpoints")
    add("--log", choices=("trackio", "wandb"), help="log there too; a CSV file is always written")
    add("--seed", type=int, default=0, help="of the order of the questions and the sampling")
    add("--smoke", action="store_true", help="two steps of the small shipped model, on the CPU")
    return parser


def smoke(parser: argparse.ArgumentParser, folder: str) -> None:
    """Other defaults: the same run as small as it can be, on questions the small model knows."""
    torch.set_num_threads(1)  # several are slower for a model this small
    parser.set_defaults(model=str(data_folder() / "text_llama"), data=like_gsm8k(folder), shots=0)
    parser.set_defaults(device="cpu", steps=2, prompts=4, group=4, tokens=40)
    parser.set_defaults(rows_per_pass=8, kl=0.01, lr=1e-4, questions=8, save_every=1)


def few_shot(o: argparse.Namespace, split: str) -> list[dict]:
    """Rows that ask in plain text; the questions that are shown solved are not among them."""
    columns = {"columns": ("question", "answer"), "config": "main"}
    shown = load_rows(o.data, "train", **columns)[: o.shots]
    solved = ""
    for row in shown:
        thought, _, answer = re.sub(r"<<.*?>>", "", row["answer"]).partition("####")
        thought = " ".join(thought.split())  # in one line: its end ends a completion
        solved += f"Q: {row['question']}\nA: <think>{thought}</think>"
        solved += f"<answer>{answer.strip()}</answer>\n"
    rows = gsm8k_rows(o.data, split)[o.shots if split == "train" else 0 :]
    for row in rows:
        question = row["prompt"][-1]["content"]
        row["prompt"] = f"{solved}Q: {question}\nA:" if shown else f"{question}\n"
    return rows


def prepare(o: argparse.Namespace) -> tuple[list[dict], list[dict], str]:
    """The rows, and the token that pads. What can be wrong is found before a weight is loaded."""
    cuda = torch.cuda.is_available()
    if o.device == "cuda" and not cuda:
        raise ValueError("--device cuda: expected a CUDA GPU, found none")
    o.device = o.device or ("cuda" if cuda else "cpu")
    half = o.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    o.dtype = o.dtype or ("bfloat16" if half else "float32")
    if o.log:
        check_installed(o.log)
    config, tokenizer = load_config(o.model)
    if o.shots is None:
        check_chat(tokenizer, "--shots 3")
        rows, test = (gsm8k_rows(o.data, split) for split in ("train", "test"))
    else:
        rows, test = (few_shot(o, split) for split in ("train", "test"))
    check_room(config, tokenizer, [*rows, *test], o.tokens)
    sizes = {"rows": o.rows_per_pass, "tokens": o.tokens, "reference": o.kl > 0}
    check_memory(config, device=o.device, **sizes)
    check_same_run(o)
    if (done := CsvLog(Path(o.out) / "log.csv").last) > o.steps:
        raise ValueError(f"--steps {o.steps}: the run in {o.out} is at step {done} already")
    return rows, test[: o.questions], tokenizer.pad_token or tokenizer.eos_token


def train(o: argparse.Namespace) -> None:
    """Ask the held-out questions, train, ask again, save."""
    rows, test, pad_token = prepare(o)
    # Weights in float32 on any device: in bfloat16 most of AdamW's steps would round to none.
    given = {"pad_token": pad_token, "device": o.device, "dtype": torch.float32}
    policy, tokenizer = load_policy(o.model, **given)
    if o.checkpointing:
        # Its name in transformers 5.23, and the one before.
        getattr(policy, "activation_checkpointing_enable", policy.gradient_checkpointing_enable)()
    ends = stop_tokens(tokenizer, policy)
    # Few-shot answers end with their line. Some vocabularies have a token ">\n", which belongs to
    # the answer too, so the rewards cut off nothing but `ends`.
    stops = line_ends(policy, tokenizer) if o.shots else ends
    # Questions are drawn without a memory, so a run that goes on is the same to the bit.
    task = TextProblems(tokenizer, rows, (tags_reward, answer_reward), (0.2, 1.0), ends)
    config = GRPOConfig(
        **VARIANTS["dapo"],  # one mean over all tokens, and a clip that is wider above
        steps=o.steps,
        prompts_per_step=o.prompts,
        group_size=o.group,
        max_new_tokens=o.tokens,
        eos_id=stops,
        pad_id=tokenizer.pad_token_id,
        kl_weight=o.kl,
        lr=o.lr,
        rows_per_pass=o.rows_per_pass,
        dtype=o.dtype,
        seed=o.seed,
        save_every=o.save_every,
    )

    def answers() -> dict:
        given = {"at_once": o.prompts * o.group, "max_new_tokens": o.tokens, "eos_id": stops}
        with precision(policy, o.dtype):
            return held_out(policy, tokenizer, test, **given)

    log = CsvLog(Path(o.out) / "log.csv", also=o.log, **vars(o))
    ask(o.out, "before", answers)
    # A config is frozen, so that no setting moves in a run. This one moves once, when it's stopped.
    with Stop(lambda: object.__setattr__(config, "save_every", 1)) as stop:
        for m in train_grpo(policy, task, config, checkpoint=Path(o.out) / "checkpoint.pt"):
            saved = stop.asked
            log.add(m.step, **{name: getattr(m, name) for name in LOGGED})
            text = decode_completion(tokenizer, m.rollouts.completions[0], stops)
            print(
                f"step {m.step}  reward {m.reward:.3f}  equal groups {m.frac_reward_zero_std:.2f}  "
                f"entropy {m.entropy:.3f}  length {m.mean_length:.0f}  "
                f"ratio {m.ratio_min:.2f} to {m.ratio_max:.2f}  {m.seconds:.1f} s\n"
                f"    {text[:200]!r}",
                flush=True,
            )
            if saved:
                raise KeyboardInterrupt
    log.close()
    ask(o.out, f"after {o.steps} steps", answers)
    save_model(o.out, policy, tokenizer)
    print(f"{o.out}: log.csv, and the model in model/")


def main(arguments: list[str] | None = None) -> None:
    """Run it, and say in one sentence what is wrong."""
    parser = options()
    o = parser.parse_args(arguments)
    with folder_of(o, "gsm8k_ours") as folder:
        if o.smoke:
            smoke(parser, folder)
            o = parser.parse_args(arguments)  # what is given outranks the defaults
        o.out = folder
        train(o)


if __name__ == "__main__":
    main()
