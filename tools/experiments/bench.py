"""Speed and memory beside transformers and TRL: what docs/speed.md shows.

    python tools/experiments/bench.py --again                 all of it (twenty minutes, two cores)
    python tools/experiments/bench.py --again --only trainer  this part alone
    python tools/experiments/bench.py --quick                 generate and trainer, not stored

Both sides take turns, and each part has processes of its own, so that none has to do with the
memory of another. Writes data/results/bench.json after each part. TRL comes with the extra `scale`.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import platform
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import store
import tokenizers
import torch
import transformers
from store import ROOT, Results, Store
from torch import Tensor, nn

from minigrpo import arithmetic, grpo, logprobs
from minigrpo.grpo import GRPOConfig
from minigrpo.llama import load_policy
from minigrpo.notebook.setup import setup
from minigrpo.rewards import answer_reward
from minigrpo.sampling import Rollouts, sample
from minigrpo.scaling.trl import QUIET, require_trl, trl_settings

BODY = {  # so small that the logits are all there is
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}  # fmt: skip
TOY = GRPOConfig(  # the rate is next to nothing, so that the lengths stay what they are
    prompts_per_step=16, group_size=8, max_new_tokens=16, eos_id=arithmetic.EOS,
    pad_id=arithmetic.PAD, how="token_mean", lr=1e-9,
)  # fmt: skip
REAL = GRPOConfig(
    prompts_per_step=8, group_size=8, max_new_tokens=26, rows_per_pass=16, how="token_mean",
    steps=3, lr=1e-5,
)  # fmt: skip


def row(
    what: str, ours: list[float], peer: str, theirs: list[float], more: bool = False
) -> Results:
    """Lowest, median, highest over the rounds; a ratio above 1 is in our favor."""
    ratio = [a / b if more else b / a for a, b in zip(ours, theirs, strict=True)]
    sides = {"ours": ours, "theirs": theirs, "ratio": ratio}
    three = {k: [float(f"{of(v):.4g}") for of in (min, median, max)] for k, v in sides.items()}
    return {"what": what, "peer": peer, **three}


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """What a process of its own finds."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


def mib() -> float:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2 ** (20 if sys.platform == "darwin" else 10)


def generate(rounds: int = 30) -> list[Results]:
    """Tokens per second that `sample` and transformers' `generate` write."""
    setup(seed=0)
    policy, pad = load_policy(), TOY.pad_id
    questions = arithmetic.draw_questions(16, torch.Generator().manual_seed(0))
    prompts = torch.stack([arithmetic.prompt_ids(question) for question in questions])

    def ours() -> Tensor:
        ends = {"max_new_tokens": TOY.max_new_tokens, "eos_id": TOY.eos_id, "pad_id": pad}
        return sample(policy, prompts, completions_per_prompt=8, **ends).completion_mask

    @torch.no_grad()
    def theirs() -> Tensor:
        ends = {"max_new_tokens": TOY.max_new_tokens, "eos_token_id": TOY.eos_id}
        ends |= {"attention_mask": torch.ones_like(prompts), "pad_token_id": pad}
        ends |= {"do_sample": True, "top_k": 0, "num_return_sequences": 8}
        return policy.generate(prompts, **ends)[:, prompts.shape[1] :] != pad

    rates: dict[Callable, list[float]] = {ours: [], theirs: []}
    for _ in range(rounds + 1):  # the first round warms up
        for write, rate in rates.items():
            began = time.perf_counter()
            rate.append(int(write().sum()) / (time.perf_counter() - began))
    what = "tokens per second, 16 x 8 completions"
    return [row(what, rates[ours][1:], "generate of transformers", rates[theirs][1:], more=True)]


# --------------------------------------------------------------------------------------------
# our loop and TRL's trainer


class Given:
    """The same prompts in the same order, and the same reward, for our loop and for TRL's."""

    def __init__(self, prompts: Tensor, reward: Callable[[list[int], list[int]], float]) -> None:
        self.left, self.of = prompts.tolist(), reward  # of the ids of a prompt and a completion

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        return [torch.tensor(self.left.pop(0)) for _ in range(n)]

    def reward(self, prompts: list[Tensor], completions: list[Tensor]) -> list[float]:
        return [self.of(p.tolist(), c.tolist()) for p, c in zip(prompts, completions)]


def toy(prompt: list[int], completion: list[int]) -> float:
    """The reward of notebook 07."""
    question = arithmetic.read_question(torch.tensor(prompt))
    return answer_reward(completion, arithmetic.running_totals(question)[-1], arithmetic.TAGS)


def even(prompt: list[int], completion: list[int]) -> float:
    """The fraction of even tokens."""
    return fmean(token % 2 == 0 for token in completion)


def trl_trainer(
    policy: nn.Module, tokenizer: Any, task: Given, config: GRPOConfig, took: list
) -> Any:
    """TRL's trainer with the same settings, which adds the seconds of each update to `took`."""
    import trl
    from datasets import Dataset, disable_progress_bars

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            took.append(-time.perf_counter())

        def on_step_end(self, *_: object, **__: object) -> None:
            took[-1] += time.perf_counter()

    def reward(ids: list[list[int]], completion_ids: list[list[int]], **_: object) -> list[float]:
        return [task.of(*both) for both in zip(ids, completion_ids)]

    disable_progress_bars()
    texts = config.prompts_per_step * config.group_size
    at_once = min(config.rows_per_pass, texts)
    own = {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": texts // at_once}
    own |= {"reward_weights": None, "shuffle_dataset": False, "logging_strategy": "no"}
    settings = trl.GRPOConfig(tempfile.gettempdir(), **{**QUIET, **trl_settings(config), **own})
    rows = Dataset.from_list([{"prompt": tokenizer.decode(i), "ids": i} for i in task.left])
    data = {"train_dataset": rows, "processing_class": tokenizer}
    trainer = trl.GRPOTrainer(policy, reward, settings, **data, callbacks=[Clock()])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def trainer(updates: int, rounds: int = 3, steps: int = 12) -> Results:
    """Completions trained on per second."""
    setup(seed=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "data" / "tiny_llama")
    rates: tuple[list[float], list[float]] = [], []
    for seed in range(rounds):
        config = replace(TOY, steps=steps, inner_epochs=updates, seed=seed)
        questions = arithmetic.draw_questions(16 * steps, torch.Generator().manual_seed(seed))
        prompts = torch.stack([arithmetic.prompt_ids(question) for question in questions])
        ours = [m.seconds for m in grpo.train_grpo(load_policy(), Given(prompts, toy), config)]
        took: list[float] = []
        trl_trainer(load_policy(), tokenizer, Given(prompts, toy), config, took).train()
        theirs = [sum(took[i : i + updates]) for i in range(0, len(took), updates)]
        for rate, side in zip(rates, (ours, theirs)):
            rate.append(16 * 8 / median(side))
    what = f"completions trained on per second, {updates} update{'s' * (updates > 1)} per batch"
    return row(what, rates[0], "GRPOTrainer of TRL", rates[1], more=True)


def llama(**shape: Any) -> nn.Module:
    """Random weights, all cores. Its EOS is in no vocabulary, so every completion is full."""
    setup(seed=0)
    torch.set_num_threads(os.cpu_count() or 1)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **ends)).eval()


def three_steps(ours: bool, shape: Results, config: GRPOConfig) -> tuple[list[float], float, float]:
    """Seconds of each, and MiB once the model was there and at peak."""
    model, V, took = llama(**shape), shape["vocab_size"], []
    task = Given(torch.randint(0, V, (24, 160)), even)
    if ours:
        built, steps = mib(), grpo.train_grpo(model, task, config)
        return [m.seconds for m in steps], built, mib()
    words = {f"w{i}": i for i in range(V)} | {"end": V}  # for every token, and an EOS
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    ends = {"eos_token": "end", "pad_token": "end", "padding_side": "left"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
    trainer = trl_trainer(model, tokenizer, task, config, took)
    built = mib()
    trainer.train()
    return took, built, mib()


def real_model(shape: Results = SMOLLM2, config: GRPOConfig = REAL) -> list[Results]:
    """Three steps in the shape of SmolLM2-135M: seconds of the last two, and memory."""
    mine, built, peak = apart(three_steps, True, shape, config)
    other, their_built, their_peak = apart(three_steps, False, shape, config)
    size, trl = "135 million parameters, all cores", "GRPOTrainer of TRL"
    most = f"MiB at peak in three steps, {size}"
    return [
        row(f"seconds per step of GRPO, {size}", mine[1:], trl, other[1:]),
        row(f"{most}, the whole process", [peak], trl, [their_peak]),
        row(f"{most}, beside the model", [peak - built], trl, [their_peak - their_built]),
    ]


# --------------------------------------------------------------------------------------------
# the vocabulary


@torch.no_grad()
def scored(ours: bool, N: int, V: int) -> float:
    """MiB that it takes to score N rows of random tokens, to log-probs and entropies."""
    model, ids = llama(vocab_size=V, **BODY), torch.randint(0, V, (N, 60))
    real = torch.ones_like(ids, dtype=torch.bool)
    r = Rollouts(ids[:, :20], real[:, :20], ids[:, 20:], real[:, 20:], torch.zeros(N, 40))
    before = mib()
    if ours:
        grpo.score(model, r, GRPOConfig())
    else:  # from a distribution of the size of all logits
        logits = torch.cat(logprobs.completion_logits(model, *r.text), dim=1)
        distribution = logprobs.next_token_log_probs(logits)
        distribution.gather(-1, r.completions[..., None]), logprobs.token_entropy(distribution)
    return mib() - before


def scoring(V: int = 151_936) -> list[Results]:
    """Memory of scoring 128 rows; the plain way gets 16, as all would take more than 20 GiB."""
    ours, theirs = apart(scored, True, 128, V), apart(scored, False, 16, V) * 128 / 16
    what = f"MiB beside the model, scoring 128 rows at V = {V:,}"
    return [row(what, [ours], "a log-softmax of all logits, scaled from 16 rows", [theirs])]


# --------------------------------------------------------------------------------------------
# what is stored and shown


class Part(NamedTuple):
    """Rows of docs/speed.md that are measured together."""

    part: str


TABLES = {"speed": ("generate", "trainer"), "real size": ("scoring", "real_model")}
PARTS = [Part(name) for names in TABLES.values() for name in names]


def machine() -> Results:
    """What a ratio depends on, beside the processor."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "trl")}
    return {"cores": os.cpu_count(), "threads": 1, "python": platform.python_version(), **versions}


def processor() -> str:
    """With the numbers that a name like "AMD EPYC" leaves open, where Linux tells them."""
    info = Path("/proc/cpuinfo")
    text = info.read_text("utf-8") if info.is_file() else ""
    found = re.findall(r"^(?:cpu family|model|model name)\s*: (.+)", text, re.MULTILINE)[:3]
    if len(found) < 3:
        return platform.processor() or platform.machine()
    return "{2} (cpu family {0}, model {1})".format(*found)


STORE = Store("bench.json", PARTS, machine)


def measure(one: Part, quick: bool = False) -> Results:
    """A part with its day and processor; its lowest and highest ratio are over all its runs."""
    rows = {
        "generate": lambda: apart(generate, 3 if quick else 30),
        "trainer": lambda: [apart(trainer, n, *((1, 3) if quick else (3, 12))) for n in (1, 2)],
        "scoring": scoring,
        "real_model": real_model,
    }[one.part]()
    measured = f"{datetime.date.today()}, {processor()}"
    for old in [] if quick else [run for run in STORE.stored() if run["part"] == one.part]:
        measured += f"; before that {old['measured']}"
        for new, then in zip(rows, old["rows"]):
            lows, middle, highs = zip(new["ratio"], then["ratio"])
            new["ratio"] = [min(lows), middle[0], max(highs)]
    return {**one._asdict(), "measured": measured, "rows": rows}


def load() -> Results:
    """All that is stored."""
    return store.load(STORE.file)


def number(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def line(one: Results) -> str:
    """A row of the table: medians, and the ratio with its lowest and highest in brackets."""
    low, middle, high = map(number, one["ratio"])
    ratio = middle if low == high else f"{middle} ({low} to {high})"
    ours, theirs = number(one["ours"][1]), number(one["theirs"][1])
    return f"| {one['what']} | {ours} | {theirs} ({one['peer']}) | {ratio} |"


def table(stored: Results, name: str) -> str:
    """For docs/speed.md: the rows, and below them with what and when they were measured."""
    runs = [run for run in stored["runs"] if run["part"] in TABLES[name]]
    on = "{cores} cores, {threads} thread unless a row says otherwise; Python {python}, "
    on += "torch {torch}, transformers {transformers}, TRL {trl}."
    notes = [on.format_map(stored["settings"]), ". ".join({r["measured"]: 0 for r in runs}) + "."]
    rows = [line(one) for run in runs for one in run["rows"]]
    head = ["| what | minigrpo | peer | ratio |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, *(f"\n*{note}*" for note in notes)])


def main(arguments: list[str] | None = None) -> None:
    """Measure and store, or with --quick measure a little and print it."""
    parser = store.parser(__doc__, (one.part for one in PARTS))
    parser.add_argument("--quick", action="store_true", help="generate and trainer, not stored")
    options = parser.parse_args(arguments)
    require_trl()
    wanted = [one for one in PARTS if options.only in (None, one.part)]
    if options.quick:
        for one in wanted[:2]:
            print(*map(line, measure(one, quick=True)["rows"]), sep="\n", flush=True)
        return
    STORE.fill(
        measure, lambda run: "\n" + "\n".join(map(line, run["rows"])), options.again, only=wanted
    )


if __name__ == "__main__":
    main()
