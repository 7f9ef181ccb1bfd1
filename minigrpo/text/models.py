"""A policy with its tokenizer, from a folder or the hub, and the memory that training it takes.

The small ones that ship are transformers' own classes, so the same functions take a large model.
Training one takes more: a prompt that asks for the form, a smaller learning rate, memory.
"""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def load_pretrained(
    name_or_path: str | Path,  # a folder that `save_pretrained` wrote, or a name on the hub
    *,
    pad_token: str | None = None,  # for tokenizers without one; may be the EOS, see below
    device: torch.device | str | None = None,  # None = the GPU if there is one, else the CPU
    dtype: torch.dtype | None = None,  # None = bfloat16 on a GPU that has it, else float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model, in eval mode, and its tokenizer, which pads on the left.

    Masks are made from positions here, so a token is never taken for padding by its id. Steps of
    AdamW that are small against the weights are lost in bfloat16. FileNotFoundError: no folder, or
    no tokenizer in it; ValueError: weights are missing, or the tokenizer does not fit the model.
    """
    folder = Path(expanduser(name_or_path))
    local = folder.is_dir()
    if not local and (folder.is_absolute() or str(name_or_path)[:1] in ".~"):
        raise FileNotFoundError(f"name_or_path: expected a folder, found none at {folder}")
    if local and not [*folder.glob("tokenizer*"), *folder.glob("vocab.json")]:
        # Some versions of transformers make an empty tokenizer up.
        raise FileNotFoundError(f"name_or_path: expected a tokenizer in {folder}, found none")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = torch.bfloat16 if half else torch.float32
    source = str(folder if local else name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
    policy, report = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, local_files_only=local, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):  # transformers fills them in and only warns
        raise ValueError(f"name_or_path: in {source} weights are missing: {', '.join(missing)}")
    known = policy.get_input_embeddings().num_embeddings  # rows that fill up may be among them
    if (largest := max(tokenizer.get_vocab().values())) >= known:
        raise ValueError(f"tokenizer: expected ids below {known}, the model's, but has {largest}")
    if pad_token is not None and pad_token not in tokenizer.get_vocab():
        raise ValueError(f"pad_token: expected a token of the tokenizer, got {pad_token!r}")
    tokenizer.pad_token = pad_token or tokenizer.pad_token
    if tokenizer.pad_token is None:
        raise ValueError(f"pad_token: expected one, such as {tokenizer.eos_token!r}, got none")
    tokenizer.padding_side = "left"
    return policy.to(device).eval(), tokenizer


# What the backward pass keeps, in bytes per token and layer, as hooks have counted it: for each
# unit of the width, of the MLP's inner width, of the keys' width, for each head; and the norms.
KEPT = (30, 8, 4, 4, 8)  # in bfloat16, by autocast
TILE = (4096, 32_768)  # tokens x vocabulary, of which TRL 1.16 holds the logits at a time


def kept(config: PretrainedConfig, tokens: int, *, checkpointing: bool) -> int:
    """Bytes of activations of a Llama or a Qwen2 for all tokens of a pass, prompts included.

    With checkpointing: what enters each layer, in float32, and one layer as a whole.
    """
    text = config.get_text_config()
    width, heads = text.hidden_size, text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    inner = getattr(text, "intermediate_size", None) or 4 * width
    sizes = width, inner, width * groups // heads, heads, 1
    layer = sum(size * times for size, times in zip(sizes, KEPT))
    layers = text.num_hidden_layers
    return tokens * (4 * width * layers + layer if checkpointing else layer * layers)


def memory(
    config: PretrainedConfig,
    *,
    rows: int,  # in one pass
    tokens: int,  # of a completion, at most
    reference: bool = False,  # of a KL, a frozen copy
    trained: int | None = None,  # parameters that learn; None = all (LoRA: its own)
    weight_bytes: int = 4,  # of each weight: 2 where they are frozen and in bfloat16 (LoRA)
    sampler: int = 0,  # bytes that a program beside the training takes, such as vLLM
    tiles: bool = False,  # as TRL scores; else the logits of all tokens are there
    autocast: bool = False,  # which keeps float32 weights in bfloat16, too
    cards: int = 1,  # that divide among them
    stage: int = 3,  # the averages (ZeRO 1), the gradients too (2), the weights too (3, FSDP)
) -> dict[str, int]:
    """The least bytes that training needs on a card, from the config alone; `kept` comes on top.

    Float32 weights, 4 bytes each; gradients and AdamW's two averages, 12 for each that learns.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()  # transformers 5.0 leaves that out
    count = sum(p.numel() for p in model.parameters())
    learn = count if trained is None else trained
    averages, gradients, weights = (cards if stage >= least else 1 for least in (1, 2, 3))
    vocabulary = config.get_text_config().vocab_size
    logits = 3 * 4 * rows * tokens * vocabulary  # their gradient, and what both need
    if tiles:
        logits = 4 * min(rows * tokens, TILE[0]) * min(vocabulary, TILE[1])
    return {
        "weights": (weight_bytes * count + 4 * (trained or 0)) // weights,
        "gradients and averages": 4 * learn // gradients + 8 * learn // averages,
        "copies": 2 * count * (autocast and weight_bytes == 4) // weights,
        "reference": 4 * count * reference // weights,
        "logits": logits,
        "sampler": sampler,
    }
