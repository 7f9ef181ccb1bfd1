"""The two small text models: shapes, a tokenizer, and a warm-up on what a careless pupil writes.

They are transformers' own GPT-2 and Llama classes, so what takes them takes a large model, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from minigrpo.checks import check_choice
from minigrpo.pretrain import PretrainConfig, PretrainMetrics, documents_batch, pretrain
from minigrpo.rewards import TEXT_TAGS
from minigrpo.text.problems import MOST, Problem, draw_problem

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


def careless(problem: Problem, generator: torch.Generator) -> str:
    """A completion by a pupil who is careless: right in form and answer about one time in three."""
    guess = int(torch.randint(1, MOST + 1, (), generator=generator))
    knows, idle, slip = torch.rand(3, generator=generator).tolist()
    thought, answer = problem.thought, problem.answer if knows < 0.7 else str(guess)
    if idle < 0.25:  # does not think, and guesses
        thought, answer = "", str(guess)
    slips = (
        f"The answer is {answer}.",
        f"<think>{thought} <answer>{answer}</answer>",
        f"<think>{thought}</think>\n{answer}",
        f"<answer>{answer}</answer>",
    )
    if slip < 0.4:
        return slips[int(torch.randint(len(slips), (), generator=generator))]
    return replace(problem, thought=thought, answer=answer).completion


def warmup_batch(
    n: int, generator: torch.Generator, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, Tensor]:
    """n careless demonstrations: ids (n, S), and the loss mask (n, S), 1 on completion and EOS."""
    documents = []
    for _ in range(n):
        problem = draw_problem(generator)
        asked = tokenizer(problem.prompt)["input_ids"]
        learned = tokenizer(careless(problem, generator))["input_ids"]
        documents.append((asked, [*learned, tokenizer.eos_token_id]))
    return documents_batch(documents, tokenizer.pad_token_id)


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
