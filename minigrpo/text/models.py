"""Small text models of the shapes of GPT-2 and Llama, for where no hub and no GPU is within reach.

They read and write word problems in plain English through a byte-level BPE tokenizer, and are
transformers' own classes, so that whatever runs on them runs on the large ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from minigrpo.pretrain import PretrainConfig, PretrainMetrics, pretrain
from minigrpo.rewards import TEXT_TAGS
from minigrpo.text.problems import careless, draw_problem, warmup_batch

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


# --------------------------------------------------------------------------------------------
# policies and tokenizers


def load_policy(
    name_or_path: str | Path,
    *,
    pad_token: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, from a folder or from the hub.

    Args:
        name_or_path: a folder that `save_pretrained` wrote, or a name on the hub, such as
            "openai-community/gpt2".
        pad_token: a token to pad with, for tokenizers without one. It may be the EOS: masks are
            made from positions here, so a token is never taken for padding by its id.
        device: None = the GPU if there is one, otherwise the CPU.
        dtype: of the weights; None = bfloat16 on a GPU that has it, otherwise float32. Steps of
            AdamW that are small against the weights are lost in bfloat16.

    Returns:
        the policy, in eval mode, and its tokenizer, which pads on the left.

    Raises:
        FileNotFoundError: no such folder, or no model or tokenizer in it.
        OSError: a name that is neither a folder nor within reach.
        ValueError: a folder that is damaged; a tokenizer without a pad token, or with tokens that
            the model does not have.
    """
    folder = Path(os.path.expanduser(name_or_path))
    local = folder.is_dir()
    if not local and (folder.is_absolute() or str(name_or_path)[:1] in ".~" or folder.exists()):
        raise FileNotFoundError(f"name_or_path: expected a folder, found none at {folder}")
    if local:
        _check_files(folder)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = torch.bfloat16 if half else torch.float32
    source = str(folder if local else name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        policy, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, local_files_only=local, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise _not_loaded(source, local, error) from error
    if report["missing_keys"]:  # transformers fills them with random numbers, and only warns
        raise ValueError(
            f"name_or_path: expected a whole model, but in {source} there are weights missing: "
            f"{', '.join(sorted(report['missing_keys']))}"
        )
    _check_vocabulary(tokenizer, policy)
    _set_padding(tokenizer, pad_token)
    return policy.to(device).eval(), tokenizer


def _check_files(folder: Path) -> None:
    """Some versions of transformers make an empty tokenizer up where there is none."""
    for what, names in (
        ("a config.json", ("config.json",)),
        ("weights", ("*.safetensors", "*.bin")),
        ("a tokenizer", ("tokenizer*", "vocab.json")),
    ):
        if not any(any(folder.glob(name)) for name in names):
            raise FileNotFoundError(f"name_or_path: expected {what} in {folder}, found none")


def _not_loaded(source: str, local: bool, error: Exception) -> Exception:
    if not local:
        return OSError(
            f"name_or_path: {source!r} is no folder here, and the hub did not give it ({error}). "
            "Without a connection, give a folder that save_pretrained wrote; notebook 08 makes one."
        )
    return ValueError(
        f"name_or_path: expected a folder that save_pretrained wrote, but {source} cannot be read "
        f"({error})"
    )


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> None:
    """The model may have more tokens than the tokenizer (rows that fill up), but not fewer."""
    known = policy.get_input_embeddings().num_embeddings
    largest = max(tokenizer.get_vocab().values())
    if largest >= known:
        raise ValueError(
            f"tokenizer: expected ids below {known}, the size of the model's vocabulary, but its "
            f"largest is {largest}: it belongs to another model, or tokens were added to it alone"
        )


def _set_padding(tokenizer: PreTrainedTokenizerBase, pad_token: str | None) -> None:
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(f"pad_token: expected a token of the tokenizer, got {pad_token!r}")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "tokenizer: expected a pad token, and it has none; name one, for instance "
            f"pad_token={tokenizer.eos_token!r}"
        )
    tokenizer.padding_side = "left"


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat as `train_tokenizer`'s tokenizers write it."""


def train_tokenizer(texts: Sequence[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, like GPT-2's but smaller, learned from texts.

    Any text can be written in it, byte by byte if need be. The four tags are single tokens, and
    ordinary ones: special tokens would vanish wherever a text is decoded without them. A chat ends
    each turn with `<|end|>`.

    Args:
        texts: what to learn the merges from.
        vocab_size: number of tokens, at least 256 bytes and 10 more.

    Raises:
        ValueError: a vocabulary that is too small.
    """
    special = ["<|endoftext|>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    if vocab_size < 256 + len(special) + 4:
        raise ValueError(f"vocab_size: expected {256 + len(special) + 4} or more, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 4,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(TEXT_TAGS.form))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
