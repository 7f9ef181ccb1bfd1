"""What a CUDA card does with the recipes, the losses and the true shapes. Writes gpu.json.

    make gpu                                      ten minutes at most, one card, no network
    python tools/experiments/gpu.py --tiny        the same on small shapes, where there's no card

Each part says what failed instead of ending the rest. The shapes are those of Qwen2.5 with random
weights, so nothing is downloaded, and no completion ends before its limit. Peak memory is that of
PyTorch's allocator, beside what recipes/memory.py promises.
"""

import datetime
import gc
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import metadata, util
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import store
import torch
from store import ROOT, Part, Results, Store

sys.path.insert(0, str(ROOT / "recipes"))
import grpo_one_file
import memory
from gsm8k_trl import options, settings
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from minigrpo.files import data_folder
from minigrpo.objective import ADVANTAGE_SETTINGS, VARIANTS, group_advantages, grpo_loss
from minigrpo.text.problems import draw_rows

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GIB, MINUTES = 2**30, 10
TINY: dict[str, Any] = {}
"""Sizes that take the place of the true ones, if there are any."""
RECIPES = ["grpo_one_file.py --bf16", "gsm8k_trl.py", "gsm8k_trl.py --ask", "countdown_trl.py"]
RECIPES += ["gsm8k_trl.py --lora --kl 0.01"] if util.find_spec("peft") else []
RECIPES += ["tools_trl.py", "verl_gsm8k/make_data.py", "openrlhf_gsm8k/make_data.py"]


def smoke() -> list[Results]:
    """Every recipe's --smoke, a process each: seconds, or the last thing that it said."""
    rows = []
    for command in RECIPES[: TINY.get("recipes")]:
        began, (file, *more) = time.perf_counter(), command.split()
        run = [sys.executable, str(ROOT / "recipes" / file), "--smoke", *more]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(run, capture_output=True, text=True, env=offline)
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        ended = {"failed": said} if done.returncode else {}
        rows.append({"recipe": command, "seconds": round(time.perf_counter() - began, 1), **ended})
    return rows


def losses() -> list[Results]:
    """The course's losses here and on the CPU: the largest difference of loss and gradient."""
    rows = []
    for (name, given), dtype in product(VARIANTS.items(), (torch.float64, torch.float32)):
        how = {key: given[key] for key in ADVANTAGE_SETTINGS if key in given}
        own, found = {key: given[key] for key in given.keys() - how.keys()}, []
        for device in ("cpu", DEVICE):
            generator = torch.Generator().manual_seed(0)
            new, old = -4 * torch.rand(2, 32, 200, generator=generator, dtype=dtype)
            rewards = torch.rand(32, generator=generator, dtype=dtype).to(device)
            mask = torch.arange(200) < torch.randint(1, 200, (32, 1), generator=generator)
            new = (old + (new - old) / 50).to(device).requires_grad_()
            about = (new, old.to(device), group_advantages(rewards, 8, **how), mask.to(device))
            loss = grpo_loss(*about, max_length=200, **own)[0]
            loss.backward()
            found.append((loss.detach().cpu(), new.grad.cpu()))
        apart = [(a - b).abs().max().item() for a, b in zip(*found)]
        rows.append({"loss": name, "in": str(dtype)[6:], "apart": max(apart)})
    return rows


def autocast() -> list[Results]:
    """Nats per token between sampler (with a cache) and scorer, both of the recipe in one file."""
    prompts = [row["prompt"] for row in draw_rows(32, torch.Generator().manual_seed(0))]
    batch = words()(prompts, padding=True, return_tensors="pt").to(DEVICE)
    ids, real, rows = batch["input_ids"], batch["attention_mask"].bool(), []
    policy = begin(shape_of("Qwen2.5-0.5B"), torch.float32).eval()
    policy.generation_config.eos_token_id = [-1]
    for bf16 in (False, True):
        cfg = SimpleNamespace(max_new_tokens=40, bf16=bf16)
        torch.manual_seed(0)
        rollouts = grpo_one_file.sample(policy, ids, real, 8, cfg)
        with torch.no_grad():
            scored = grpo_one_file.score(policy, rollouts, cfg)
        written = rollouts.mask[:, -scored.shape[1] :]
        apart = (rollouts.log_probs - scored)[written].double()
        sizes = {"rms": apart.pow(2).mean().sqrt(), "largest": apart.abs().max()}
        sizes = {name: float(f"{value.item():.2g}") for name, value in sizes.items()}
        rows.append({"model": "random 0.5B", "in": "bfloat16" if bf16 else "float32", **sizes})
    return rows


def words() -> Any:
    """The tokenizer of the text models."""
    return AutoTokenizer.from_pretrained(data_folder() / "text_llama", padding_side="left")


def shape_of(name: str) -> Any:
    """Its config, or a small one that only looks like it."""
    config = memory.SHAPES[name]
    sizes = TINY.get("shape", {})
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return type(config)(**{**config.to_dict(), "layer_types": None, **sizes, **ends})


def begin(config: Any, dtype: torch.dtype) -> Any:
    """A model with random weights, made where it stays; the peak is counted from here."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def told(who: str, name: str, o: Any, sampling: float, learning: float) -> Results:
    """A row: rates, seconds of a step, and peak GiB."""
    N = o.prompts * o.group
    row = {"who": who, "model": name, "lora": o.lora, "rows": o.rows, "prompt": o.prompt}
    row |= {"tokens": o.tokens, "completions": N, "sampled": round(N * o.tokens / sampling)}
    row |= {"learned": round(N * (o.prompt + o.tokens) / learning)}
    row |= {"seconds sampling": round(sampling, 1), "seconds learning": round(learning, 1)}
    return {**row, "peak": round(torch.cuda.max_memory_allocated() / GIB, 2) if CUDA else None}


def planned(name: str, *arguments: str) -> tuple[Any, Any]:
    """The options of memory.py, and the config; MemoryError if there isn't the room."""
    o = memory.options().parse_args(list(arguments))
    o.card = (torch.cuda.mem_get_info()[1] if CUDA else 2**40) / GIB
    vars(o).update(TINY.get("run", {}))
    config = shape_of(name)
    plan = memory.plan(config, o)
    if max(plan["learning"], plan["sampling"]) > o.card * GIB:
        raise MemoryError(f"{plan['learning'] / GIB:.1f} GiB promised, {o.card:.1f} there")
    return o, config


def one_file(name: str) -> Results:
    """A step of the recipe in one file: it keeps all activations, and the logits of a pass."""
    o, config = planned(name, "--no-checkpointing", "--whole-logits")
    policy = begin(config, torch.float32).eval()
    policy.generation_config.eos_token_id = [-1]
    cfg = SimpleNamespace(bf16=CUDA, clip=0.2, kl_weight=0.0)
    cfg.inner_epochs, cfg.rows_per_pass = 1, o.rows
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-6)
    ids = torch.randint(config.vocab_size, (o.prompts, o.prompt), device=DEVICE)
    for cfg.max_new_tokens in (4, o.tokens):  # the first one warms up
        times = [now()]
        rollouts = grpo_one_file.sample(policy, ids, torch.ones_like(ids).bool(), o.group, cfg)
        times.append(now())
        advantages = torch.randn(len(rollouts.ids), device=DEVICE)
        grpo_one_file.learn(policy, None, optimizer, rollouts, advantages, cfg)
        times.append(now())
    return told("one file", name, o, times[1] - times[0], times[2] - times[1])


class Clock(TrainerCallback):
    """When a step begins and ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(now())

    on_step_end = on_step_begin


def with_trl(name: str, *more: str) -> Results:
    """Two steps of TRL with the settings of `gsm8k_trl.py`; the second one counts."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    warnings.filterwarnings("ignore", category=FutureWarning)
    o, config = planned(name, *more)
    recipe = options("", data=None).parse_args([])
    recipe.lora, recipe.vllm, recipe.device, recipe.lr = o.lora, bool(o.vllm), DEVICE, 1e-6
    recipe.rows_per_pass, recipe.tokens, recipe.steps = o.rows, o.tokens, 2
    recipe.prompts, recipe.group, recipe.out = o.prompts, o.group, tempfile.mkdtemp()
    own = settings(recipe, o.prompt + o.tokens) | {"save_strategy": "no"}
    own |= {"log_completions": False, "model_init_kwargs": None, "logging_strategy": "no"}
    tokenizer, clock, lora = words(), Clock(), None
    known = (word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    word = next(word for word in known if len(tokenizer(50 * word)["input_ids"]) == 50)
    if o.lora:
        from peft import LoraConfig

        lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")

    def reward(prompts: list, **_: Any) -> list[float]:
        clock.times.append(now())
        return torch.rand(len(prompts)).tolist()

    model = begin(config, torch.bfloat16 if o.lora else torch.float32)
    if o.vllm:  # it reads the weights from a folder
        model.save_pretrained(recipe.out), tokenizer.save_pretrained(recipe.out)
        model.config._name_or_path = recipe.out
    rows = Dataset.from_list([{"prompt": word * o.prompt}] * 2 * o.prompts)
    data = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": [clock]}
    trainer = GRPOTrainer(model, reward, GRPOConfig(**own), **data, peft_config=lora)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    began, graded, ended = clock.times[3:6]
    row = told("TRL", name, o, graded - began, ended - graded)
    return {**row, "vllm": True} if o.vllm else row


def shapes() -> list[Results]:
    """Sampling and update at the true shapes, ours beside TRL, LoRA for the largest; vLLM last."""
    small, middle, large = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B")
    wanted = [(with_trl, small), (one_file, small), (with_trl, middle), (one_file, middle)]
    wanted += [(with_trl, large, "--lora"), (with_trl, small, "--lora")]
    wanted += [(with_trl, small, "--vllm", "0.3")] if util.find_spec("vllm") else []
    rows = []
    for run, name, *more in wanted:
        try:
            rows.append(run(name, *more))
        except Exception as error:  # such as no room, no peft
            why = f"{type(error).__name__}: {str(error)[:200]}"
            rows.append({"who": run.__name__, "model": name, "failed": why})
        print(rows[-1], flush=True)
    return rows


PARTS = {"losses": losses, "autocast": autocast, "shapes": shapes, "smoke": smoke}


def machine() -> Results:
    """What the numbers depend on."""
    names = ("torch", "transformers", "trl", "peft", "vllm")
    there = {name: metadata.version(name) for name in names if util.find_spec(name)}
    card = torch.cuda.get_device_properties(0) if CUDA else None
    told = {"card": card.name, "GiB": round(card.total_memory / GIB, 1)} if card else {"card": None}
    return {**told, "python": platform.python_version(), **there}


STORE = Store("gpu.json", [Part(name) for name in PARTS], machine)


def promised(row: Results) -> float:
    """GiB by recipes/memory.py."""
    o = memory.options().parse_args([])
    vars(o).update({name: row[name] for name in ("lora", "rows", "prompt", "tokens")})
    o.whole_logits = o.no_checkpointing = row["who"] == "one file"
    o.card, o.vllm = 80, 0.3 if row.get("vllm") else 0
    plan = memory.plan(memory.SHAPES[row["model"]], o)
    return max(plan["learning"], plan["sampling"]) / GIB


def table() -> str:
    """For recipes/README.md."""
    if not (stored := store.load(STORE.file)):
        return "*Not measured yet: `make gpu` does it.*"
    runs, card = {run["part"]: run for run in stored["runs"]}, stored["settings"]
    lines = ["| shape | what learns | with | tokens sampled a second | learned from a second "]
    lines[0] += "| seconds of a step | peak GiB | promised |"
    lines.append("|---|---|---|" + "---:|" * 5)
    for row in runs["shapes"].get("rows", ()):
        cells = [row["model"], row.get("failed")]
        if "failed" not in row:
            with_trl = f"`gsm8k_trl.py`{', vLLM' * ('vllm' in row)}"
            cells = [row["model"], "LoRA" if row["lora"] else "all weights"]
            cells += [with_trl if row["who"] == "TRL" else "one file"]
            cells += [f"{row['sampled']:,}", f"{row['learned']:,}"]
            cells += [f"{row['seconds sampling']} + {row['seconds learning']}"]
            cells += [f"{row['peak']:.1f}", f"{promised(row):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    what = f"One {card['card']}, torch {card['torch']}, transformers {card['transformers']}, "
    what += f"TRL {card['trl']}, {runs['shapes']['measured']}; random weights, 16 questions with 8 "
    what += "completions of 512 tokens, prompts of 200, 8 rows a pass."
    return "\n".join([*lines, f"\n*{what}*"])


def rates() -> Results:
    """For the calculator: tokens per second with TRL, and on which card."""
    if not (stored := store.load(STORE.file)):
        return {}
    rows = next(run for run in stored["runs"] if run["part"] == "shapes").get("rows", ())
    trl = [row for row in rows if row["who"] == "TRL" and "failed" not in row and "vllm" not in row]
    keys = ("sampled", "learned", "lora", "completions", "tokens")
    found = {row["model"]: {key: row[key] for key in keys} for row in reversed(trl)}
    return {"card": stored["settings"]["card"], "rates": found}


def late(*_: Any) -> None:
    raise TimeoutError(f"the {MINUTES} minutes are over")


def main(arguments: list[str] | None = None) -> int:
    tiny = {"action": "store_true", "help": "small shapes, on any machine; no file"}
    o = store.options(arguments, PARTS, **{"--tiny": tiny})
    if not (CUDA or o.tiny):
        print("error: this measures a CUDA card, and there is none: see --tiny", file=sys.stderr)
        return 2
    deadline = time.time() + 60 * MINUTES

    def measure(one: Part) -> Results:
        """A part, or why it failed."""
        signal.signal(signal.SIGALRM, late)
        signal.alarm(max(1, int(deadline - time.time())))
        try:
            found = {"rows": PARTS[one.part]()}
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        signal.alarm(0)
        return {**one._asdict(), "measured": str(datetime.date.today()), **found}

    if o.tiny:
        TINY["shape"] = {"hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 1}
        TINY["shape"] |= {"vocab_size": 400, "num_attention_heads": 14, "num_key_value_heads": 2}
        TINY["recipes"] = 1
        TINY["run"] = {"rows": 4, "prompt": 6, "tokens": 4, "prompts": 2, "group": 4}
        store.FOLDER = Path(tempfile.mkdtemp())
    STORE.fill(measure, o.again, only=[Part(name) for name in o.only])
    for run in STORE.stored():
        print(run["part"], run.get("failed", ""), *run.get("rows", ()), sep="\n  ")
    bad = [one for run in STORE.stored() for one in (run, *run.get("rows", ())) if "failed" in one]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
