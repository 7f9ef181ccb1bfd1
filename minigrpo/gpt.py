"""A character-level GPT, which answers the call of a Hugging Face causal language model.

GPT-2 (Radford et al. 2019), pre-norm (Xiong et al. 2020, arXiv 2002.04745), no biases.
"""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from minigrpo.checks import check_shape
from minigrpo.logprobs import positions_from_mask


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 65
    max_position_embeddings: int = 256  # the context, in tokens; the name is Hugging Face's
    width: int = 192  # of the stream; a multiple of num_heads
    num_layers: int = 2
    num_heads: int = 6


def causal_mask(num_queries: int, num_keys: int | None = None) -> Tensor:
    """(queries, keys) bool, True = may read. With a cache, the queries are the last of the keys."""
    num_keys = num_queries if num_keys is None else num_keys
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def sinusoids(num_positions: int, width: int) -> Tensor:
    """(num_positions, width): growing waves (Vaswani et al. 2017), so that neighbors are alike."""
    wavelengths = 10_000 ** (torch.arange(0, width, 2) / width)  # over 2 pi, in positions
    angles = torch.arange(num_positions)[:, None] / wavelengths  # (num_positions, width / 2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


class MultiHeadAttention(nn.Module):
    """Causal self-attention with several heads (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        linear = partial(nn.Linear, config.width, config.width, bias=False)
        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()

    def forward(
        self,
        x: Tensor,  # (N, S, width)
        mask: Tensor | None = None,  # (N, 1, S, keys), True = may read; None if S is 1 or keys
        cache: DynamicCache | None = None,  # keys and values of earlier tokens, extended in place
        layer: int = 0,  # the cache's name for this layer
    ) -> Tensor:  # (N, S, width)
        split = (*x.shape[:2], self.num_heads, -1)
        projections = (self.query, self.key, self.value)
        q, k, v = (p(x).view(split).transpose(1, 2) for p in projections)  # (N, heads, S, head)
        if cache is not None:
            k, v = cache.update(k, v, layer)
        # A single query is the newest token: it reads every key, so it needs no mask.
        causal = mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside; it acts on each token alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., width) -> (..., width)
        return self.down(F.gelu(self.up(x)))


class DecoderBlock(nn.Module):
    """Attention, then MLP; each reads a normalized copy of the stream and adds to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = MultiHeadAttention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask=None, cache=None, layer: int = 0) -> Tensor:  # as attention
        x = x + self.attention(self.norm1(x), mask, cache, layer)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks (of a class to choose), a norm, a head."""

    def __init__(self, config: GPTConfig, block: type[nn.Module] = DecoderBlock) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.width)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        # GPT-2's start: small weights, no opinion yet, so that the first loss is ln(vocab_size).
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds_to_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
                shrink = math.sqrt(2 * config.num_layers) if adds_to_stream else 1.0
                nn.init.normal_(weight, std=0.02 / shrink)
        waves = sinusoids(config.max_position_embeddings, config.width)
        self.position_embedding.weight.data.copy_(0.1 * waves)

    def forward(
        self,
        input_ids: Tensor,  # (N, S); with a cache, only the tokens that are new
        attention_mask: Tensor | None = None,  # (N, past + S), 1 = real token; None = all real
        position_ids: Tensor | None = None,  # (N, S); None = counted from the attention mask
        past_key_values: DynamicCache | None = None,  # of an earlier call; extended in place
        use_cache: bool = False,
    ) -> CausalLMOutputWithPast:  # .logits (N, S, vocab_size); .past_key_values, or None
        """Logits for the token after each of `input_ids`; ValueError for more than the context."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        new, total = input_ids.shape[1], past + input_ids.shape[1]
        if attention_mask is not None:  # a mask of the new tokens alone would broadcast
            check_shape("attention_mask", attention_mask, (len(input_ids), total))
        if position_ids is None and attention_mask is None:
            position_ids = torch.arange(past, total, device=input_ids.device)[None]
        elif position_ids is None:
            position_ids = positions_from_mask(attention_mask)[:, past:]
        longest, context = int(position_ids.max()) + 1, self.config.max_position_embeddings
        if longest > context:
            raise ValueError(f"input_ids: expected at most {context} tokens, got {longest}")

        mask = None  # enough where all is real, and the new tokens are all there are, or just one
        if attention_mask is not None or 1 < new < total:
            mask = causal_mask(new, total).to(input_ids.device)[None, None]  # (1, 1, S, keys)
        if attention_mask is not None:
            # A padding token may read itself: a query that may read nothing would give NaN.
            itself = torch.eye(total, dtype=torch.bool, device=mask.device)[total - new :]
            mask = (mask & attention_mask.bool()[:, None, None]) | itself  # (N, 1, S, keys)
        x = self.token_embedding(input_ids) + self.position_embedding(position_ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, past_key_values, layer)  # (N, S, width)
        logits = self.lm_head(self.norm(x))
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


def load_gpt(path: str | Path) -> GPT:
    """Read a GPT from one safetensors file with its sizes; the weights come back as float32."""
    with safe_open(path, framework="pt") as file:
        model = GPT(GPTConfig(**json.loads(file.metadata()["config"])))
        model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})
    return model
