"""Small text models of the shapes of GPT-2 and Llama, for where no hub and no GPU is within reach.

They read and write word problems in plain English through a byte-level BPE tokenizer, and are
transformers' own classes, so that whatever runs on them runs on the large ones. As a command this
trains the two that ship in `data/`:

    python -m minigrpo.text_models --out data
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from minigrpo.llama import save_policy
from minigrpo.pretrain import PretrainConfig, PretrainMetrics, pretrain
from minigrpo.problems import careless, draw_problem, warmup_batch
from minigrpo.runtime import setup
from minigrpo.text import train_tokenizer

WIDTH, LAYERS, HEADS, CONTEXT = 96, 2, 4, 128
VOCABULARY = 384  # at most; there are no more pairs to merge after 375
WARMUP = PretrainConfig(steps=1000, lr=3e-3, matrix_lr=None, weight_decay=0.01, warmup=30)
"""How the base models are trained, on batches of `WARMUP_ROWS`."""
WARMUP_ROWS = 64
FAMILIES = ("gpt2", "llama")


def problem_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 375 tokens that has seen 500 word problems and what pupils wrote to them."""
    generator = torch.Generator().manual_seed(0)
    problems = [draw_problem(generator) for _ in range(500)]
    texts = [problem.prompt + problem.completion for problem in problems]
    texts += [careless(problem, generator) for problem in problems]
    return train_tokenizer(texts, VOCABULARY)


def small_model(family: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> PreTrainedModel:
    """An untrained model of 2 layers, 96 wide, with a context of 128 tokens.

    Args:
        family: "gpt2" (learned absolute positions, 272,160 parameters) or "llama" (rotary
            positions, 367,392 parameters).
        tokenizer: its vocabulary is the model's.
        seed: same seed, same weights; the global random state is left as it was.

    Raises:
        ValueError: another family.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {', '.join(FAMILIES)}, got {family!r}")
    ids = {
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if family == "gpt2":
            config = GPT2Config(
                vocab_size=len(tokenizer),
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                n_positions=CONTEXT,
                initializer_range=0.08,  # narrow models learn several times faster than with 0.02
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                **ids,
            )
            return GPT2LMHeadModel(config).eval()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=CONTEXT,
            initializer_range=0.1,
            **ids,
        )
        return LlamaForCausalLM(config).eval()


def warm_up(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: PretrainConfig = WARMUP
) -> Iterator[PretrainMetrics]:
    """Teach a policy to write what careless pupils write, in place, without any reward."""
    return pretrain(policy, partial(warmup_batch, WARMUP_ROWS, tokenizer=tokenizer), config)


def main(arguments: list[str] | None = None) -> None:
    """Train both base models and write them, in float16, to folders named after their family."""
    parser = argparse.ArgumentParser(
        prog="python -m minigrpo.text_models", description=main.__doc__
    )
    parser.add_argument("--out", required=True, type=Path, help="the folder that holds the two")
    parser.add_argument("--steps", type=int, default=WARMUP.steps)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the documents")
    options = parser.parse_args(arguments)

    device = setup(options.seed)
    tokenizer = problem_tokenizer()
    for family in FAMILIES:
        policy = small_model(family, tokenizer, options.seed).to(device)
        config = replace(WARMUP, steps=options.steps, seed=options.seed)
        for m in warm_up(policy, tokenizer, config):
            if m.step % 100 == 0 or m.step == config.steps:
                print(
                    f"{family}  step {m.step:4d}  loss {m.loss:.3f}  {m.seconds:.0f} s", flush=True
                )
        save_policy(policy.half(), options.out / f"text_{family}", tokenizer)


if __name__ == "__main__":
    main()
