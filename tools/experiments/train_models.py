"""Train the models that ship in `data/`: `tools/experiments/train_models.py --help` lists them.

`make checkpoint` runs all three. The same seed gives the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import text_models as models
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from minigrpo import corpus, llama
from minigrpo.arithmetic import BOS, EOS, PAD, VOCABULARY, evaluate
from minigrpo.files import atomic_path
from minigrpo.gpt import GPT, GPTConfig
from minigrpo.notebook.setup import setup
from minigrpo.pretrain import PretrainConfig, PretrainMetrics, pretrain, validation_loss
from minigrpo.study import experiments

LENGTH, BATCH = 256, 16  # of the char GPT: characters per window, and windows per step


def char_gpt(options: argparse.Namespace) -> None:
    """Train the char GPT on the real corpus."""
    text = corpus.load_corpus()
    if not text.is_shakespeare:
        raise SystemExit(
            "the checkpoint is trained on tinyshakespeare, which could not be had\n"
            + text.describe()
        )
    train, val = corpus.split(corpus.CharTokenizer().encode(text.text))
    model = GPT(GPTConfig(max_position_embeddings=LENGTH))  # before `setup` seeds torch
    model = model.to(setup(options.seed))
    config = PretrainConfig(steps=options.steps, seed=options.seed, eval_every=100)

    def next_batch(generator) -> Tensor:
        return corpus.random_batch(train, BATCH, LENGTH, generator)

    def measure(model: nn.Module) -> float:
        return validation_loss(model, val, LENGTH, max_windows=64)

    run = pretrain(model, next_batch, config, evaluate=measure)
    report("char_gpt", run, config)
    save_gpt(model, options.out)
    print(f"validation loss {validation_loss(model, val, LENGTH):.4f}: {options.out}")


def save_gpt(model: GPT, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
    """Write weights (as `dtype`) and sizes to one safetensors file, which appears when whole."""
    weights = {name: w.detach().to(dtype).contiguous() for name, w in model.state_dict().items()}
    with atomic_path(path) as unfinished:
        save_file(weights, unfinished, metadata={"config": json.dumps(asdict(model.config))})


def tiny_llama(options: argparse.Namespace) -> None:
    """Train the base model of the arithmetic task."""
    policy = llama.tiny_llama(options.seed).to(setup(options.seed))
    config = replace(experiments.WARMUP, steps=options.steps, seed=options.seed)
    report("tiny_llama", experiments.warm_up(policy, config), config)
    save(policy, build_tokenizer(), options.out)
    scores = evaluate(policy)
    print("  ".join(f"{name} {value:.2f}" for name, value in scores.items()))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for the 32 tokens: words between blanks. A word that is none is an error.

    The tags are ordinary words: special tokens would vanish from every text that is decoded
    without special tokens, and with them the parts that a reward looks for.
    """
    words = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))  # not one of the words
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=VOCABULARY[PAD],
        bos_token=VOCABULARY[BOS],
        eos_token=VOCABULARY[EOS],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def text_models(options: argparse.Namespace) -> None:
    """Train both text models and write them, in float16, to folders named after their family."""
    device = setup(options.seed)
    tokenizer = models.problem_tokenizer()
    for family in models.FAMILIES:
        policy = models.small_model(family, tokenizer, options.seed).to(device)
        config = replace(models.WARMUP, steps=options.steps, seed=options.seed)
        report(family, models.warm_up(policy, tokenizer, config), config)
        save(policy.half(), tokenizer, options.out / f"text_{family}")


def save(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write both so that `AutoModelForCausalLM` and `AutoTokenizer` can load them."""
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def report(name: str, run: Iterable[PretrainMetrics], config: PretrainConfig) -> None:
    """Print a line every 100 steps."""
    for m in run:
        if m.step % 100 == 0 or m.step == config.steps:
            val = "" if m.val_loss is None else f"  val {m.val_loss:.3f}"
            print(
                f"{name}  step {m.step:4d}  loss {m.loss:.3f}{val}  {m.seconds:.0f} s", flush=True
            )


def main(arguments: list[str] | None = None) -> None:
    """Train one of them and write it where `--out` says."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    commands = parser.add_subparsers(required=True, metavar="model")
    usual = {char_gpt: 2000, tiny_llama: experiments.WARMUP.steps, text_models: 1000}
    for train, steps in usual.items():
        command = commands.add_parser(train.__name__, help=train.__doc__)
        command.set_defaults(train=train)
        command.add_argument("--out", required=True, type=Path, help="the file or folder to write")
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.train(options)


if __name__ == "__main__":
    main()
