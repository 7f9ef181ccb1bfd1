"""What several test files share: tiny policies, and the proof that a test is able to fail."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minigrpo.clinic.catalogue import planted
from minigrpo.gpt import GPT, GPTConfig


def float64(*numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def must_fail_on(*mistakes: str) -> Callable:
    """Run a test without arguments as it is, and once per mistake of the catalogue: it has to fail.

    Failing means an AssertionError: a mistake that only crashes shows nothing about the test.
    """

    def decorate(test: Callable[[], None]) -> Callable:
        @pytest.mark.parametrize("mistake", ["", *mistakes])
        def run(mistake):
            if not mistake:
                test()
                return
            with planted(mistake), pytest.raises(AssertionError):
                test()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


def tiny_gpt(seed: int = 0, *, vocab_size: int = 11, context: int = 24, std: float = 0.4) -> GPT:
    """A GPT in float64 whose weights are large enough that every token and position matters."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size, context, width=16, num_layers=2, num_heads=2)).double()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=std)
    return model


def tiny_llama(seed: int = 0, *, vocab_size: int = 11, context: int = 24) -> LlamaForCausalLM:
    """The same for transformers' Llama."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        initializer_range=0.4,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).double()


class Bigram(nn.Module):
    """A policy to compute with by hand: row a of its (V, V) table holds the logits after token a.

    It keeps no cache (`past_key_values` is None), and writes down what it was asked to read.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.read: list[Tensor] = []

    def forward(self, input_ids: Tensor, **_) -> SimpleNamespace:
        self.read.append(input_ids)
        return SimpleNamespace(logits=self.table[input_ids], past_key_values=None)


def successor(vocab_size: int, high: float = 0.0, low: float = -math.inf) -> Bigram:
    """The policy that counts: after token a it is certain of (a + 1) % vocab_size."""
    certain = torch.eye(vocab_size, dtype=torch.bool).roll(1, dims=1)
    table = torch.full((vocab_size, vocab_size), low, dtype=torch.float64)
    return Bigram(table.masked_fill(certain, high))


def weights(policy: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


@contextmanager
def saved_bytes() -> Iterator[dict[int, int]]:
    """By their places, the sizes of what autograd saves in the block."""
    sizes: dict[int, int] = {}
    alive = []  # or the next tensor could have the same place

    def keep(saved: Tensor) -> Tensor:
        sizes[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        alive.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        yield sizes


def with_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy that puts a BOS, here `<|system|>`, before every text, as its chat template does."""
    tokenizer, bos = copy.deepcopy(tokenizer), "<|system|>"
    special = [(bos, tokenizer.convert_tokens_to_ids(bos))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=special
    )
    tokenizer.chat_template = bos + tokenizer.chat_template
    return tokenizer


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    """Numbers between -1 and 1 in float64, the same on every call."""
    return 2 * torch.rand(shape, dtype=torch.float64, generator=generator(seed)) - 1


@st.composite
def masks(draw: st.DrawFn, rows: tuple[int, int] = (1, 4), empty: bool = True) -> Tensor:
    """Masks (N, T), holes included; a row without a real token only if `empty`."""
    columns = draw(st.integers(1, 5))
    row = st.lists(st.booleans(), min_size=columns, max_size=columns)
    row = row if empty else row.filter(any)
    return torch.tensor(draw(st.lists(row, min_size=rows[0], max_size=rows[1])))


GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
"""What may stand where a mask is 0."""
