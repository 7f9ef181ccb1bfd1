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


def memory(
    config: PretrainedConfig,
    *,
    rows: int,  # in one pass
    tokens: int,  # of a completion, at most
    reference: bool = False,  # of a KL, a frozen copy
    trained: int | None = None,  # parameters that learn; None = all (LoRA: its own)
    weight_bytes: int = 4,  # of each weight: 2 where they are frozen and in bfloat16 (LoRA)
    sampler: int = 0,  # bytes that a program beside the training takes, such as vLLM
) -> dict[str, int]:
    """The least bytes that training needs, from the config alone; what layers keep comes on top.

    Float32 weights, 4 bytes each; gradients and AdamW's two averages, 12 for each that learns.
    """
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    vocabulary = config.get_text_config().vocab_size
    return {
        "weights": weight_bytes * count + 4 * (trained or 0),
        "gradients and averages": 12 * (count if trained is None else trained),
        "reference": 4 * count * reference,
        "logits": 3 * 4 * rows * tokens * vocabulary,  # their gradient, and what both need
        "sampler": sampler,
    }
