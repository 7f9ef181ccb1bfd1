"""A tiny Llama for the 32 tokens of `arithmetic`, its tokenizer, and how to save and load the pair.

The model is transformers' own LlamaForCausalLM, so anything that can load a Llama can load it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from minigrpo.arithmetic import BOS, EOS, PAD, VOCABULARY, warmup_batch
from minigrpo.files import data_folder
from minigrpo.pretrain import PretrainConfig, PretrainMetrics, pretrain

WARMUP = PretrainConfig(steps=400, lr=5e-3, matrix_lr=None, weight_decay=0.01, warmup=30)
"""How the base model is trained, on batches of `WARMUP_ROWS`.

AdamW alone: at this size Muon does no better, and takes longer.
"""
WARMUP_ROWS = 128

SAVED_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""What a saved policy may consist of."""


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """An untrained Llama with 135,488 parameters: 2 layers, 64 wide, 4 heads, 32 tokens.

    The weights are drawn with a standard deviation of 0.1 instead of Llama's 0.02, with which a
    model as narrow as this learns several times more slowly. Same seed, same weights; the global
    random state is left as it was.
    """
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for the 32 tokens: words between blanks, no more.

    The tags are ordinary words. Registered as special tokens they would vanish from every text that
    is decoded without special tokens, and with them the parts that a reward looks for. There is no
    token for unknown words: a text that has one is an error, and not silently another text.
    """
    words = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # not one of the words
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


def save_policy(
    policy: PreTrainedModel,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write model and tokenizer so that `AutoModelForCausalLM` and `AutoTokenizer` can load them.

    The folder gets its name only when it is complete. A policy that was saved there before is
    replaced, and comes back if that fails.

    Args:
        policy: the model.
        folder: where to.
        tokenizer: None = the one of the 32 tokens.

    Raises:
        FileExistsError: something else has this name, and would be lost.
        ValueError: the working folder, which could not be replaced.
    """
    folder = Path(folder).resolve()  # so that "." has a name, and a link stays one
    if folder == Path.cwd():
        raise ValueError(f"folder: expected another than the working folder, got {folder}")
    if folder.exists():
        there = {f.name for f in folder.iterdir()} if folder.is_dir() else {"a file"}
        if there - SAVED_FILES:
            raise FileExistsError(
                f"folder: expected a new or empty folder, or one with a saved policy, but at "
                f"{folder} there is {', '.join(sorted(there - SAVED_FILES))}"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    unfinished = folder.with_name(f".{folder.name}.{mark}.part")
    replaced = folder.with_name(f".{folder.name}.{mark}.old")
    try:
        policy.save_pretrained(unfinished)
        (tokenizer or build_tokenizer()).save_pretrained(unfinished)
        if folder.exists():  # a folder that is not empty cannot be replaced in one step
            os.replace(folder, replaced)
        os.replace(unfinished, folder)
    finally:
        if replaced.exists() and not folder.exists():
            os.replace(replaced, folder)
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def load_policy(folder: str | Path | None = None) -> LlamaForCausalLM:
    """Load a policy that `save_policy` wrote, in float32 and eval mode; None = the shipped base.

    Raises:
        FileNotFoundError: there is no such folder, or no model in it.
        ValueError: what is in it is no Llama for these 32 tokens, or not a whole one.
    """
    folder = data_folder() / "tiny_llama" if folder is None else Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"folder: expected one that save_policy wrote, found no config.json in {folder}"
        )
    try:
        config = LlamaConfig.from_pretrained(folder, local_files_only=True)
        if config.vocab_size != len(VOCABULARY):  # before a large model is built
            raise ValueError(f"it has {config.vocab_size} tokens instead of {len(VOCABULARY)}")
        policy, report = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # transformers raises whatever the broken file leads it to
        raise ValueError(
            f"folder: expected one that save_policy wrote, but {folder} cannot be read ({error})"
        ) from error
    # transformers fills what is missing with random numbers, and only warns.
    astray = [*report["missing_keys"], *report["unexpected_keys"]]
    if astray:
        raise ValueError(
            f"folder: expected a whole policy, but in {folder} there are weights missing or "
            f"unknown: {', '.join(sorted(astray))}"
        )
    return policy.eval()


def warm_up(
    policy: nn.Module, config: PretrainConfig = WARMUP, **settings: Any
) -> Iterator[PretrainMetrics]:
    """Teach a policy to add and to answer in the right form, in place, without any reward.

    settings: of `warmup_documents`, such as operations="mixed" or complete=0.2.
    """
    return pretrain(policy, partial(warmup_batch, WARMUP_ROWS, **settings), config)
