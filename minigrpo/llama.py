"""A tiny Llama for the 32 tokens of `arithmetic`, transformers' own."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minigrpo.arithmetic import BOS, EOS, PAD, VOCABULARY
from minigrpo.files import data_folder


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """An untrained Llama with 135,488 parameters; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,  # with Llama's 0.02, a model so narrow learns much more slowly
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def load_policy(folder: str | Path | None = None) -> LlamaForCausalLM:
    """What `save_pretrained` wrote, in float32 and eval mode; None = the base model that ships."""
    folder = data_folder() / "tiny_llama" if folder is None else folder
    policy, report = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    # transformers fills what is missing with random numbers, and only warns.
    astray, size = [*report["missing_keys"], *report["unexpected_keys"]], policy.vocab_size
    if astray or size != len(VOCABULARY):
        raise ValueError(f"folder: expected 32 tokens and all weights, got {size}, astray {astray}")
    return policy.eval()
