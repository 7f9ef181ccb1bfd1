"""One measurement at the size of real models, in this process; real_size.py starts them.

    python tests/benchmarks/real_work.py update ours 64

Prints what it found as a line of JSON: MiB, or seconds and MiB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lines import seconds
from memory import mib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minigrpo import grpo
from minigrpo.grpo import GRPOConfig, learn, score, train_grpo
from minigrpo.logprobs import completion_logits, next_token_log_probs, token_entropy
from minigrpo.notebook.setup import setup
from minigrpo.objective import group_advantages, grpo_loss
from minigrpo.sampling import Rollouts

PROMPTS, GROUP = 8, 8
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


def llama(**shape: Any) -> LlamaForCausalLM:
    """Random weights, in eval mode. Its EOS is in no vocabulary, so every completion is full."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return LlamaForCausalLM(LlamaConfig(**shape, **ends)).eval()


def texts(V: int, N: int, prompt: int = 20, completion: int = 40) -> Rollouts:
    """N rows of random tokens, in groups, without padding; a new model finds all tokens alike."""
    prompts = torch.randint(0, V, (N // GROUP, prompt)).repeat_interleave(GROUP, dim=0)
    written = torch.randint(0, V, (N, completion))
    real = [torch.ones_like(ids, dtype=torch.bool) for ids in (prompts, written)]
    log_probs = torch.full((N, completion), -math.log(V))
    return Rollouts(prompts, real[0], written, real[1], log_probs)


# ---------------------------------------------------------------------------------------------
# the vocabulary


def plain_score(model: nn.Module, r: Rollouts) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from a distribution of the size of all logits, both with gradient."""
    distribution = next_token_log_probs(torch.cat(completion_logits(model, *r.text), dim=1))
    log_probs = distribution.gather(-1, r.completions[..., None]).squeeze(-1)
    return log_probs, token_entropy(distribution)


def plain_loss(model: nn.Module, r: Rollouts, A: Tensor) -> tuple[Tensor, Tensor]:
    """Of all rows at once; and the entropy, which the plain loop keeps until its update is done."""
    log_probs, entropy = plain_score(model, r)
    entropies = {"entropy": entropy.detach()}
    return grpo_loss(log_probs, r.log_probs, A, r.completion_mask, **entropies)[0], entropy


def updater(
    side: str, model: LlamaForCausalLM, r: Rollouts, A: Tensor, rows_per_pass: int
) -> Callable[[], None]:
    """An update, ready to be run: "ours", "plain", or that of TRL's trainer, "trl"."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-9)
    T = r.completions.shape[1]
    settings = {"max_new_tokens": T, "how": "token_mean", "rows_per_pass": rows_per_pass}
    config = GRPOConfig(prompts_per_step=PROMPTS, group_size=GROUP, check=False, **settings)

    def finish() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()

    def plain() -> None:
        loss, _kept = plain_loss(model, r, A)
        loss.backward()
        finish()

    def trls() -> None:
        for rows in torch.arange(len(A)).split(rows_per_pass):
            trl_loss(trainer, r[rows], A[rows]).backward()
        finish()

    if side == "trl":
        from minigrpo.scaling.trl import trl_loss

        trainer = their_trainer(model, model.config.vocab_size, config, r.prompt_ids[::GROUP])
        return trls
    return plain if side == "plain" else lambda: learn(model, None, optimizer, r, A, config)


def update(side: str, rows_per_pass: int, quick: bool) -> float:
    """MiB that an update takes on top of what was there before: gradients, Adam, and the rest."""
    V, N = 2000 if quick else 50_000, PROMPTS * GROUP
    run = updater(side, llama(vocab_size=V, **BODY), texts(V, N), torch.randn(N), rows_per_pass)
    before = mib()
    run()
    return mib() - before


@torch.no_grad()
def scoring(side: str, N: int, quick: bool) -> float:
    """MiB that it takes to score N rows without gradient."""
    V = 5000 if quick else 151_936
    model, r = llama(vocab_size=V, **BODY), texts(V, N)
    before = mib()
    score(model, r, GRPOConfig()) if side == "ours" else plain_score(model, r)
    return mib() - before


# ---------------------------------------------------------------------------------------------
# 135 million parameters


class Given:
    """Prompts in a fixed order; the more even tokens a completion has, the better."""

    def __init__(self, prompts: Tensor) -> None:
        self.left = list(prompts)

    def prompts(self, n: int, generator: torch.Generator) -> list[Tensor]:
        return [self.left.pop(0) for _ in range(n)]

    def reward(self, prompts: list[Tensor], completions: list[Tensor]) -> list[float]:
        return even([ids.tolist() for ids in completions])


def even(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The fraction of even tokens."""
    return [statistics.mean(token % 2 == 0 for token in ids) for ids in completion_ids]


def their_trainer(model: LlamaForCausalLM, V: int, config: GRPOConfig, prompts: Tensor) -> Any:
    """TRL's GRPOTrainer with the same settings, for prompts that its tokenizer turns into these.

    The tokenizer has a word for every token, and an EOS that the model does not have.
    """
    import trl
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.trainer_callback import PrinterCallback

    from minigrpo.scaling.trl import QUIET, trl_settings

    disable_progress_bars()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)} | {"end": V}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="end", pad_token="end", padding_side="left"
    )
    rows = [{"prompt": " ".join(f"w{i}" for i in ids)} for ids in prompts.tolist()]
    at_once = min(config.rows_per_pass, config.prompts_per_step * config.group_size)
    settings = {
        **QUIET,
        **trl_settings(config),
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": config.prompts_per_step * config.group_size // at_once,
        "reward_weights": None,
        "shuffle_dataset": False,
        "logging_strategy": "no",
    }
    trainer = trl.GRPOTrainer(
        model,
        even,
        trl.GRPOConfig(output_dir=tempfile.gettempdir(), **settings),  # which it leaves empty
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def their_seconds(trainer: Any) -> list[float]:
    """Train, and how long each step took: it writes 64 completions, and learns from them."""
    from transformers import TrainerCallback

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            times.append(-time.perf_counter())

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            times[-1] += time.perf_counter()

    trainer.add_callback(Clock)
    trainer.train()
    return times


def steps(side: str, quick: bool) -> dict[str, Any]:
    """Seconds of three steps, and MiB once the model was there and at peak."""
    config = GRPOConfig(
        steps=3,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        max_new_tokens=4 if quick else 26,
        rows_per_pass=16,
        how="token_mean",
        lr=1e-5,
    )
    shape = {**SMOLLM2, "num_hidden_layers": 1} if quick else SMOLLM2
    model = llama(**shape)
    prompts = torch.randint(0, model.config.vocab_size, (3 * PROMPTS, 8 if quick else 160))
    if side == "ours":
        built = mib()
        times = [m.seconds for m in train_grpo(model, Given(prompts), config)]
    else:
        trainer = their_trainer(model, model.config.vocab_size, config, prompts)
        built = mib()
        times = their_seconds(trainer)
    return {"seconds": times, "built": built, "peak": mib()}


def autocast(folder: Path, quick: bool) -> dict[str, Any]:
    """An update of a real model on completions it wrote: seconds in both precisions, gradients."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
    import real_run

    lab = real_run.Lab(folder, "one loss")
    config = real_run.config(real_run.RUNS[0], lab.stops, lab.tokenizer.pad_token_id)
    config = replace(config, check=False, max_grad_norm=1e9)
    if quick:
        config = replace(config, prompts_per_step=2, max_new_tokens=8)
    generator = torch.Generator().manual_seed(0)
    prompts = list(lab.task.prompts(config.prompts_per_step, generator))
    r, rewards = grpo.rollout(lab.policy, lab.task, prompts, config, generator)
    A = group_advantages(rewards, config.group_size)
    weights = list(lab.policy.parameters())
    times: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    gradients = {}
    for _ in range(2 if quick else 6):  # the first round warms up
        for dtype in times:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                with torch.no_grad():  # so that the ratio is 1 on both sides
                    r = replace(r, log_probs=score(lab.policy, r, config)[0])
                optimizer = torch.optim.AdamW(weights, 0.0)
                update = partial(learn, lab.policy, None, optimizer, r, A, config)
                times[dtype].append(seconds(update))
            gradients[dtype] = [p.grad.clone() for p in weights]
    moved = [a - b for a, b in zip(gradients["bfloat16"], gradients["float32"])]
    return {
        "seconds": {dtype: took[1:] for dtype, took in times.items()},
        "moved": nn.utils.get_total_norm(moved).item(),
        "norm": nn.utils.get_total_norm(gradients["float32"]).item(),
    }


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("update", "score", "steps", "autocast"))
    parser.add_argument("of", help="ours, trl or plain; the folder of a model")
    parser.add_argument("rows", nargs="?", type=int, default=64)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    setup(seed=0)
    what, of, quick = options.what, options.of, options.quick
    if what == "autocast":
        found: object = autocast(Path(of), quick)
    elif what == "steps":
        found = steps(of, quick)
    else:
        found = (update if what == "update" else scoring)(of, options.rows, quick)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
