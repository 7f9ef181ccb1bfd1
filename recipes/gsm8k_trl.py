"""GRPO on GSM8K, grade-school word problems, with TRL's GRPOTrainer.

    python recipes/gsm8k_trl.py --smoke                            # seconds, no network
    python recipes/gsm8k_trl.py --ask                              # is there something to learn?
    python recipes/gsm8k_trl.py                                    # one GPU, all weights learn
    python recipes/gsm8k_trl.py --lora --vllm                      # adapters learn, vLLM samples
    accelerate launch --num_processes 4 recipes/gsm8k_trl.py --vllm          # four GPUs

Needs the extra `scale` (TRL); --lora needs peft, --vllm needs vllm and a CUDA GPU. The weights are
float32 and the arithmetic is bfloat16 (autocast), as TRL has it by default. The learning rate warms
up over ten steps, so that of the first is 0. With several processes --prompts stays the number for
all of them together, so the same settings mean the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from pathlib import Path

import torch
from gsm8k import HUB, gsm8k_rows, like_gsm8k
from running import (
    FIVE,
    CsvLog,
    Defaults,
    Stop,
    alarm,
    ask,
    check_chat,
    check_installed,
    check_memory,
    check_overlap,
    check_room,
    check_same_run,
    count,
    device_line,
    folder_of,
    grade,
    held_out,
    load_config,
    load_function,
    pass_at,
    save_model,
    stored,
)
from transformers import AutoModelForCausalLM, PretrainedConfig, TrainerCallback
from transformers.pytorch_utils import Conv1D

from minigrpo.files import atomic_path, data_folder
from minigrpo.scaling.trl import require_trl
from minigrpo.text.models import memory
from minigrpo.text.prompts import RewardFunction, answer_reward
from minigrpo.text.shots import tags_reward

RANK = 32  # of adapters
WEIGHTS = [0.2, 1.0]  # of the form, a quarter for each tag, and of the answer
RIGHT, WRONG = (f"<think>so</think><answer>{n}</answer>" for n in (12, 13))  # to grade, of 12


def options(description: str, data: str | None) -> argparse.ArgumentParser:
    """What can be set; `countdown_trl.py` takes the same."""
    parser = run_options(description)
    add = parser.add_argument
    add("--data", default=data, help="a data set on the hub, or a json, jsonl, csv, parquet file")
    add("--ask", action="store_true", help="only ask, before training: pass@1, pass@G, by kind")
    return parser


def run_options(description: str) -> argparse.ArgumentParser:
    """What can be set for any task; `tools_trl.py` takes these."""
    parser = argparse.ArgumentParser(description=description, formatter_class=Defaults)
    add = parser.add_argument
    add("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="a name on the hub, or a folder")
    add("--reward", help="file.py:function, called as TRL does, instead of the right answer's")
    add("--template", help="a file with a chat template, for a tokenizer that has none")
    add("--out", help="a folder for all files of the run [runs/ and the recipe's name]")
    add("--steps", type=count, default=200, help="updates of the weights")
    add("--prompts", type=count, default=16, help="questions per step")
    add("--group", type=count, default=8, help="completions per question, G")
    add("--rows-per-pass", type=count, default=8, help="rows that one GPU scores at a time")
    add("--tokens", type=count, default=512, help="of a completion, at most")
    add("--lr", type=float, help="learning rate, after ten steps from 0 up [1e-6; --lora 1e-5]")
    add("--kl", type=float, default=0.0, help="weight of the KL to the first policy, beta")
    add("--lora", action="store_true", help="adapters of rank 32 learn, and nothing else")
    add("--vllm", action="store_true", help="sample with vLLM, on the same GPUs")
    add("--vllm-share", type=float, default=0.3, help="fraction of each GPU that vLLM may take")
    add("--questions", type=count, default=200, help="held out, asked before and after")
    add("--eval-every", type=count, default=20, help="steps between two times that they're asked")
    add("--save-every", type=count, default=20, help="steps between two checkpoints")
    add("--log", choices=("trackio", "wandb"), help="log there too; a CSV file is always written")
    add("--seed", type=int, default=0, help="of the order of the questions and the sampling")
    add("--smoke", action="store_true", help="two steps of the small shipped model")
    return parser


def adapter_size(config: PretrainedConfig) -> int:
    """Parameters of adapters at every linear layer but the last, without any weight loaded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D)]
    return sum(RANK * sum(m.weight.shape) for m in linear if m is not model.get_output_embeddings())


def check(o: argparse.Namespace) -> tuple:
    """The config and the tokenizer, if this run can work: all of it before a weight is loaded."""
    require_trl()
    for wanted, package in ((o.lora, "peft"), (o.vllm, "vllm"), (o.log, o.log)):
        if wanted:
            check_installed(package)
    if o.vllm and not torch.cuda.is_available():
        raise ValueError("--vllm: expected a CUDA GPU, found none")
    processes, rows = int(os.environ.get("WORLD_SIZE", "1")), o.prompts * o.group
    if o.group < 2 or rows % (o.rows_per_pass * processes):
        raise ValueError(
            f"--prompts {o.prompts} x --group {o.group}: expected a group of 2 or more, and "
            f"{rows} rows that divide into passes of {o.rows_per_pass} on {processes} processes"
        )
    config, tokenizer = load_config(o.model)
    if o.template:
        tokenizer.chat_template = Path(o.template).read_text(encoding="utf-8")
    check_chat(tokenizer)
    tokenizer.padding_side = "left"
    # The same token is no harm: padding is told by its position, here and in TRL.
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lora = {"trained": adapter_size(config), "weight_bytes": 2} if o.lora else {}
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if o.device == "cuda" else "cpu"
    if o.vllm:
        total = torch.cuda.get_device_properties(device).total_memory
        lora["sampler"] = check_share(config, o.vllm_share, total)
    # TRL scores in tiles and never holds the logits of a pass. Those of sampling remain: one token
    # of each row.
    sizes = {"rows": rows // processes, "tokens": 1, "reference": o.kl > 0 and not o.lora}
    sizes["autocast"] = o.device == "cuda"
    check_memory(config, device=device, **sizes, **lora, **sharding())
    return config, tokenizer


def check_share(config: PretrainedConfig, share: float, total: int) -> int:
    """vLLM's bytes of a card. ValueError: they don't hold its own copy of the weights."""
    copy, sampler = memory(config, rows=0, tokens=0)["weights"] // 2, int(share * total)
    if copy > sampler:
        raise ValueError(
            f"--vllm-share {share:g}: that is {sampler / 2**30:.1f} GiB of this card, and vLLM's "
            f"own copy of the weights in bfloat16 takes {copy / 2**30:.1f}: raise the share"
        )
    return sampler


def sharding() -> dict[str, int]:
    """What `accelerate launch` divides among how many cards, in the words of `memory`."""
    cards, stage = int(os.environ.get("WORLD_SIZE", "1")), 0
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        stage = 3
    elif os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    return {"cards": cards, "stage": stage}


def settings(o: argparse.Namespace, room: int) -> dict:
    """This run in the words of TRL's GRPOConfig."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = {
        "output_dir": o.out,
        # The batch: rows in a pass x passes x processes = questions x completions.
        "per_device_train_batch_size": o.rows_per_pass,
        "gradient_accumulation_steps": o.prompts * o.group // (o.rows_per_pass * processes),
        "num_generations": o.group,
        "max_completion_length": o.tokens,
        "max_steps": o.steps,
        # The objective: token mean, clip 0.2, advantages over the group's standard deviation.
        "loss_type": "dapo",
        "epsilon": 0.2,
        "scale_rewards": "group",
        "beta": o.kl,  # above 0, a frozen copy of the model is loaded too
        "learning_rate": o.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": min(10, o.steps // 2),
        "max_grad_norm": 1.0,
        # The machine: float32 weights, bfloat16 arithmetic, activations computed twice.
        "use_cpu": o.device == "cpu",
        "dataloader_pin_memory": o.device == "cuda",
        "bf16": o.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False),
        "gradient_checkpointing": True,
        # Adapters leave the weights alone, so those may be bfloat16: no step of theirs gets lost.
        "model_init_kwargs": {"dtype": "bfloat16" if o.lora else "float32"},
        "seed": o.seed,
        # The files: a line per step is written by `Journal`, the completions by TRL.
        "logging_steps": 1,
        "log_completions": True,
        "num_completions_to_print": 0,  # they fill a screen each step; read them in completions/
        "report_to": o.log or "none",
        "save_steps": o.save_every,
        "save_total_limit": 2,
        "disable_tqdm": True,
    }
    if o.vllm:
        arguments |= {"use_vllm": True, "vllm_mode": "colocate"}
        arguments |= {"vllm_gpu_memory_utilization": o.vllm_share, "vllm_max_model_length": room}
        # Sampler and scorer differ a little at every token. TRL's default multiplies that up over
        # a completion and drops the long ones; this weighs token by token, at most twice.
        arguments["vllm_importance_sampling_mode"] = "token_truncate"
        arguments["vllm_importance_sampling_clip_max"] = 2.0
    return arguments


class Journal(TrainerCallback):
    """A line of CSV per step, and held-out questions every so often; loud if the start is bad.

    Whoever asks for the end gets it after the step, which is saved.
    """

    def __init__(self, o: argparse.Namespace, stop: Stop, right: str) -> None:
        self.log, self.stop, self.o, self.right = CsvLog(Path(o.out) / "log.csv"), stop, o, right
        self.first, self.held_out, self.told = [], {}, None
        self.ask = None  # what `train` puts there

    def on_train_begin(self, args, state, control, **_):
        self.ask(0)

    def on_step_end(self, args, state, control, **_):
        asked = torch.tensor(float(self.stop.asked), device=args.device)
        if torch.distributed.is_initialized():  # all processes stop after the same step
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        self.stop.asked = bool(asked)
        if self.stop.asked:
            control.should_save = control.should_training_stop = True
        elif state.global_step % self.o.eval_every == 0:
            self.held_out = {"held_out": self.ask(state.global_step)}
            control.should_log = True  # an evaluation of TRL's takes that back

    def on_log(self, args, state, control, logs, **_):
        if not state.is_world_process_zero or "reward" not in logs:
            return
        there = {k: v for k, v in logs.items() if v is not None}
        self.log.add(state.global_step, **there, **self.held_out)
        self.held_out = {}
        names = {**FIVE, "mismatch": "sampling/sampling_logp_difference/mean"}  # that with vLLM
        names["calls"] = "tools/call_frequency"  # that with tools
        numbers = [f"{k} {float(logs[name]):.3f}" for k, name in names.items() if name in logs]
        print(f"step {state.global_step}  {'  '.join(numbers)}", flush=True)
        self.first.append(logs)
        if len(self.first) == min(3, self.o.steps):
            for wrong in alarm(self.first, f"rewards/{self.right}/mean"):
                print(f"\n!!! After {state.global_step} steps: {wrong}.\n", file=sys.stderr)


def newest_checkpoint(out: str) -> tuple[int, str | None]:
    """Steps and folder of the last checkpoint that is whole: trainer_state.json is written last."""
    folders = sorted(Path(out).glob("checkpoint-[0-9]*"), key=lambda folder: int(folder.name[11:]))
    for folder in reversed(folders):
        try:
            state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            return state["global_step"], str(folder)
        except (OSError, ValueError, KeyError):
            print(f"{folder} was not finished, so an older one is taken", file=sys.stderr)
    return 0, None


def ask_first(o: argparse.Namespace, tokenizer, rows: list[dict], right) -> None:
    """How often the model is right before it learns, in how many groups rewards differ, by kind."""
    dtype = torch.bfloat16 if o.device == "cuda" else torch.float32
    policy = AutoModelForCausalLM.from_pretrained(o.model, dtype=dtype).to(o.device).eval()
    chosen = [rows[i] for i in torch.randperm(len(rows))[: 4 * o.prompts]]
    rewards = [*zip(WEIGHTS, (tags_reward, right))]
    settings = {"group": o.group, "at_once": o.prompts * o.group, "max_new_tokens": o.tokens}
    found = pass_at(policy, tokenizer, chosen, rewards, **settings)
    stored(Path(o.out) / "ask.json", lambda: found)
    for kind, told in found.items():
        numbers = ", ".join(f"{name} {value:.2f}" for name, value in [*told.items()][1:-1])
        print(f"{kind}, {told['questions']} questions: {numbers}", end=", ")
        print(f"groups that differ {told['differ']:.2f}")


def checked(o, rows: list[dict], test: list[dict], right, texts, form, weights) -> tuple:
    """Whatever can be wrong is seen here, before a weight is loaded."""
    if "WORLD_SIZE" not in os.environ:  # one process, one GPU; several are a matter of accelerate
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    o.device = "cuda" if torch.cuda.is_available() else "cpu"
    o.lr = (1e-5 if o.lora else 1e-6) if o.lr is None else o.lr
    right = load_function(o.reward) if o.reward else right
    config, tokenizer = check(o)
    rows = check_overlap(rows, test, str(o.data))
    room = check_room(config, tokenizer, [*rows, *test], o.tokens)
    grade(right, rows[0], [RIGHT, WRONG])
    if o.smoke and not o.reward:
        row, *two = texts
        earned = [w * x for w, f in zip(weights, (form, right)) for x in grade(f, row, two)]
        good, bad = earned[0] + earned[2], earned[1] + earned[3]
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"a right completion earns {good:g}, a wrong one {bad:g}")
        if good <= bad:
            raise ValueError("the reward doesn't tell a right completion from a wrong one")
    check_same_run(o)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        loud = sys.stdout if o.device == "cuda" else sys.stderr
        print(device_line(o.device), file=loud, flush=True)
    return tokenizer, rows, right, room


def train(
    o: argparse.Namespace,
    rows: list[dict],
    test: list[dict],
    right: RewardFunction,
    texts: tuple,  # a row, and a right and a wrong completion of it, which a smoke run grades
    form: RewardFunction | None = None,  # None: that of the tags
    weights: list[float] = WEIGHTS,  # of `form` and `right`
    environment: type | None = None,  # its methods are tools, for `environment.calls` calls
) -> None:
    """Ask the held-out questions, train, ask again, save."""
    form = form or tags_reward
    tokenizer, rows, right, room = checked(o, rows, test, right, texts, form, weights)
    if o.ask:
        return ask_first(o, tokenizer, rows, right)
    # TRL 1.16 and the settings above call it so, and newer versions of transformers otherwise.
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    peft_config = None
    if o.lora:
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=RANK, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    stop, tools = Stop(), {}
    arguments = settings(o, room) | {"reward_weights": weights}
    if environment:
        tools = {"environment_factory": environment, "eval_dataset": Dataset.from_list(test)}
        arguments |= {"max_tool_calling_iterations": environment.calls, "num_generations_eval": 1}
        # Batches of one size: TRL takes the mean of their means.
        arguments["per_device_eval_batch_size"] = math.gcd(len(test), o.rows_per_pass)
    journal = Journal(o, stop, right.__name__)
    trainer = GRPOTrainer(
        model=o.model,
        reward_funcs=[form, right],
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[journal],
        peft_config=peft_config,
        **tools,
    )
    trainer.remove_callback(PrinterCallback)
    # Where each process has a part of every layer, all of them answer together.
    sharded = sharding()["stage"] == 3 and o.device == "cuda"
    together = sharded or environment is not None

    def answers() -> dict:
        policy = trainer.model_wrapped
        policy = policy if sharded else trainer.accelerator.unwrap_model(policy)
        learning, _ = policy.training, policy.eval()
        if environment:  # TRL's own loop asks, with the tools, at its temperature of 1
            trainer.evaluate()
            seen, n = trainer.state.log_history[-1], len(test)
            share, kept = (seen[f"eval_rewards/{f.__name__}/mean"] for f in (right, form))
            error = max(0.0, share * (1 - share) / n) ** 0.5
            found = {"right": share, "error": error, "form": kept, "questions": n}
        else:
            with torch.autocast(o.device, torch.bfloat16, enabled=trainer.args.bf16):
                found = held_out(policy, tokenizer, test, reward=right, max_new_tokens=o.tokens)
        policy.train(learning)
        return found

    def asked(step: int) -> float | None:
        """Asked and told by one process; the others wait, or help."""
        when, journal.told = f"after {step} steps" if step else "before", step
        trainer.accelerator.wait_for_everyone()
        main, found = trainer.accelerator.is_main_process, None
        if main or together:
            found = ask(o.out, when, answers, tell=main)
        trainer.accelerator.wait_for_everyone()
        return found

    journal.ask = asked
    done, checkpoint = newest_checkpoint(o.out)
    if done < o.steps:
        with stop:
            trainer.train(resume_from_checkpoint=checkpoint)
        done = trainer.state.global_step
    else:  # train() would take one more step
        trainer._load_from_checkpoint(checkpoint)
    if stop.asked:
        raise KeyboardInterrupt
    if journal.told != done:
        asked(done)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        save_model(o.out, policy, tokenizer, state_dict=weights)  # of --lora, the adapters
        print(f"{o.out}: log.csv, completions/ to read, and the model in model/")


def smoke(parser: argparse.ArgumentParser, folder: str) -> None:
    """Other defaults: the same run as small as it can be, asked as the small model knows it."""
    template = Path(folder) / "smoke.jinja"
    with atomic_path(template) as file:
        file.write_text("{{ messages[-1]['content'] + '\\n' }}", encoding="utf-8")
    parser.set_defaults(model=str(data_folder() / "text_llama"), template=str(template))
    parser.set_defaults(steps=2, prompts=4, group=4, rows_per_pass=8, tokens=40)
    parser.set_defaults(questions=8, save_every=2)


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__.partition("\n")[0], data=HUB)
    o = parser.parse_args(arguments)
    with folder_of(o, "gsm8k_trl") as folder:
        if o.smoke:
            smoke(parser, folder)
            parser.set_defaults(data=like_gsm8k(folder))
            o = parser.parse_args(arguments)  # what is given outranks the defaults
        o.out = folder
        rows, test = (gsm8k_rows(o.data, split, not o.reward) for split in ("train", "test"))
        graded = {"prompt": "", "answer": "12"}, RIGHT, WRONG
        train(o, rows, test[: o.questions], answer_reward, graded)


if __name__ == "__main__":
    main()
