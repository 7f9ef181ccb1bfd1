"""Policies with their tokenizers, and two small ones that were made for this course.

The small ones are transformers' own GPT-2 and Llama classes, so the same functions take a large
model. Training one takes more: a prompt that asks for the form, a smaller learning rate, memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from os.path import expanduser
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from minigrpo.checks import check_choice
from minigrpo.pretrain import PretrainConfig, PretrainMetrics, pretrain
from minigrpo.rewards import TEXT_TAGS
from minigrpo.text.problems import careless, draw_problem, warmup_batch

SHAPES = {
    "gpt2": (GPT2LMHeadModel, {
        "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "initializer_range": 0.08,  # narrow models learn several times faster than with 0.02
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
    "llama": (LlamaForCausalLM, {
        "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 384,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
        "initializer_range": 0.1,
    }),
}  # fmt: skip
"""GPT-2 has absolute positions and 272,160 weights, Llama rotary ones and 367,392 weights."""
FAMILIES = tuple(SHAPES)
VOCABULARY = 384  # at most; there are no more pairs to merge after 375
WARMUP = PretrainConfig(steps=1000, lr=3e-3, matrix_lr=None, weight_decay=0.01, warmup=30)
WARMUP_ROWS = 64
"""How the small ones are trained before any reward, and on how many rows at a time."""


def load_policy(
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


def small_model(
    family: str,  # one of `FAMILIES`
    tokenizer: PreTrainedTokenizerBase,  # its vocabulary is the model's
    seed: int = 0,  # of the weights; the global random state is left as it was
) -> PreTrainedModel:
    """An untrained model of 2 layers, 96 wide, with a context of 128 tokens."""
    check_choice("family", family, FAMILIES)
    model, shape = SHAPES[family]
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    ids["pad_token_id"] = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return model(model.config_class(vocab_size=len(tokenizer), **shape, **ids)).eval()


def warm_up(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: PretrainConfig = WARMUP
) -> Iterator[PretrainMetrics]:
    """Teach a policy to write what careless pupils write, in place, without any reward."""
    return pretrain(policy, partial(warmup_batch, WARMUP_ROWS, tokenizer=tokenizer), config)


def problem_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 375 tokens that has seen 500 word problems and what pupils wrote to them."""
    generator = torch.Generator().manual_seed(0)
    problems = [draw_problem(generator) for _ in range(500)]
    texts = [problem.prompt + problem.completion for problem in problems]
    texts += [careless(problem, generator) for problem in problems]
    return train_tokenizer(texts, VOCABULARY)


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat as `train_tokenizer`'s tokenizers write it."""


def train_tokenizer(
    texts: Sequence[str],  # to learn the merges from
    vocab_size: int = 512,  # tokens at most; 256 bytes and 10 more are always there
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, like GPT-2's but smaller: any text can be written in it.

    The four tags are single tokens, and ordinary ones: special tokens would vanish wherever a text
    is decoded without them. A chat ends each turn with `<|end|>`.
    """
    special = "<|endoftext|> <|pad|> <|end|> <|system|> <|user|> <|assistant|>".split()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size, letters = vocab_size - 4, pre_tokenizers.ByteLevel.alphabet()  # the tags come on top
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(TEXT_TAGS.form))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[0],
        pad_token=special[1],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
