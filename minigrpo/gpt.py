"""A character-level GPT, the policy of the first half of the course.

It answers the call of a Hugging Face causal language model,
`model(input_ids, attention_mask, position_ids, past_key_values, use_cache)`, and returns
`.logits` and `.past_key_values`, so everything that samples, scores or trains serves this
model and a `LlamaForCausalLM` alike.

Architecture: Radford et al. 2019 (GPT-2), pre-norm as in Xiong et al. 2020
(arXiv 2002.04745), without biases in the linear layers.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from minigrpo.files import atomic_path


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    `max_position_embeddings` is the context: the longest sequence, in tokens, that the model
    can read. (The name is Hugging Face's, so that code asking a model for its context finds it.)
    """

    vocab_size: int = 65
    max_position_embeddings: int = 256
    width: int = 192
    num_layers: int = 2
    num_heads: int = 6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a whole number of 1 or more, got {value!r}")
        if self.width % self.num_heads:
            raise ValueError(
                f"width: expected a multiple of num_heads = {self.num_heads}, got {self.width}"
            )


def causal_mask(num_queries: int, num_keys: int | None = None) -> Tensor:
    """Which keys each query may read: itself and everything before it.

    The queries are the last `num_queries` of `num_keys` positions; before them lie the positions
    that a cache already holds. Returns a bool tensor (num_queries, num_keys), True = may read.
    """
    num_keys = num_queries if num_keys is None else num_keys
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool)
    return ones.tril(diagonal=num_keys - num_queries)


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions that count real tokens only, so that padding on the left moves nothing.

    attention_mask (N, S), 1 = real token. Returns (N, S) of whole numbers; the padding before
    the first real token gets position 0, which nobody reads.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def next_token_pairs(logits: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Put each prediction beside the token it predicts: the one place where the shift is made.

    `logits[:, s]` was computed from tokens 0..s, so it predicts token s + 1.
    logits (N, S, V), input_ids (N, S) -> predictions (N, S-1, V), targets (N, S-1).
    """
    return logits[:, :-1], input_ids[:, 1:]


def sinusoids(num_positions: int, width: int) -> Tensor:
    """Waves of slowly growing length, a column each (Vaswani et al. 2017, section 3.5).

    Position embeddings that start like this put neighbouring positions close together from the
    beginning; random ones have to learn that first. Returns (num_positions, width).
    """
    wavelengths = 10_000 ** (torch.arange(0, width, 2) / width)  # over 2 pi, in positions
    angles = torch.arange(num_positions)[:, None] / wavelengths  # (num_positions, width / 2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


class MultiHeadAttention(nn.Module):
    """Causal self-attention with several heads (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: DynamicCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """x (N, S, width) -> (N, S, width).

        mask: bool, broadcastable to (N, 1, S, keys), True = may read; None means plain causal
        attention, which fits only without earlier tokens or with a single new one (S = 1).
        cache: keys and values of earlier tokens, extended in place under `layer`.
        """
        split = (*x.shape[:2], self.num_heads, -1)
        q, k, v = (
            project(x).view(split).transpose(1, 2)  # (N, heads, S, head width)
            for project in (self.query, self.key, self.value)
        )
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

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> (..., width)."""
        return self.down(F.gelu(self.up(x)))


class DecoderBlock(nn.Module):
    """Attention, then MLP; each reads a normalised copy of the stream and adds to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = MultiHeadAttention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: DynamicCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """x (N, S, width) -> (N, S, width)."""
        x = x + self.attention(self.norm1(x), mask, cache, layer)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, a stack of blocks, a final norm, a head over the vocabulary.

    `block` is the class of the blocks, so that a variant can be tried without a second GPT.
    """

    def __init__(self, config: GPTConfig, block: type[nn.Module] = DecoderBlock) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.width)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """GPT-2's start: small weights, smaller still for what is added to the stream.

        Small logits make the first loss ln(vocab_size): a model that has no opinion yet.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds_to_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
                shrink = math.sqrt(2 * self.config.num_layers) if adds_to_stream else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)
        positions = self.position_embedding.weight
        with torch.no_grad():
            positions.copy_(0.1 * sinusoids(*positions.shape))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
    ) -> CausalLMOutputWithPast:
        """Logits for the token after each of `input_ids`.

        Args:
            input_ids: (N, S) token ids; with a cache, only the tokens that are new.
            attention_mask: (N, past + S), 1 = real token, 0 = padding; None = all real.
            position_ids: (N, S); None = counted from the attention mask.
            past_key_values: the cache returned by an earlier call; extended in place.
            use_cache: return a cache that a later call can continue from.

        Returns:
            `.logits` (N, S, vocab_size) and `.past_key_values` (None without a cache).

        Raises:
            ValueError: input_ids of a wrong shape, a mask that does not fit, or a sequence
                longer than the context.
        """
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(
                "input_ids: expected shape (N, S) with S of 1 or more, "
                f"got {tuple(input_ids.shape)}"
            )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        new, total = input_ids.shape[1], past + input_ids.shape[1]
        if attention_mask is not None and attention_mask.shape != (len(input_ids), total):
            raise ValueError(
                f"attention_mask: expected shape {(len(input_ids), total)} "
                f"({past} cached + {new} new tokens), got {tuple(attention_mask.shape)}"
            )
        if position_ids is None:
            position_ids = self._positions(attention_mask, past, total, input_ids.device)
        self._check_context(position_ids)

        x = self.token_embedding(input_ids) + self.position_embedding(position_ids)
        mask = self._mask(attention_mask, new, total, input_ids.device)
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, past_key_values, layer)
        return CausalLMOutputWithPast(
            logits=self.lm_head(self.norm(x)), past_key_values=past_key_values
        )

    def _positions(
        self, attention_mask: Tensor | None, past: int, total: int, device: torch.device
    ) -> Tensor:
        if attention_mask is None:
            return torch.arange(past, total, device=device)[None]
        return positions_from_mask(attention_mask)[:, past:]

    def _check_context(self, position_ids: Tensor) -> None:
        longest = int(position_ids.max()) + 1
        if longest > self.config.max_position_embeddings:
            raise ValueError(
                f"input_ids: expected at most {self.config.max_position_embeddings} tokens "
                f"(the context of this model), got a sequence of {longest}"
            )

    @staticmethod
    def _mask(
        attention_mask: Tensor | None, new: int, total: int, device: torch.device
    ) -> Tensor | None:
        """(N or 1, 1, new, total) bool, or None where attention can do without."""
        if attention_mask is None and new in (1, total):
            return None
        causal = causal_mask(new, total).to(device)
        if attention_mask is None:
            return causal[None, None]
        # A padding token may read itself: a query that may read nothing would give NaN.
        itself = torch.eye(total, dtype=torch.bool, device=device)[total - new :]
        return ((causal & attention_mask.bool()[:, None]) | itself)[:, None]


def save_gpt(model: GPT, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
    """Write weights (as `dtype`, by default two bytes each) and sizes to one safetensors file.

    The file appears under its name only when it is complete.
    """
    weights = {name: w.detach().to(dtype).contiguous() for name, w in model.state_dict().items()}
    with atomic_path(path) as unfinished:
        save_file(weights, unfinished, metadata={"config": json.dumps(asdict(model.config))})


def load_gpt(path: str | Path) -> GPT:
    """Read a GPT written by `save_gpt`; its weights come back as float32.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint of this GPT (the message says why).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"path: expected a checkpoint written by save_gpt, found no file {path}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            config = GPTConfig(**json.loads((file.metadata() or {})["config"]))
            weights = {name: file.get_tensor(name).float() for name in file.keys()}
        model = GPT(config)
        model.load_state_dict(weights)
    except (SafetensorError, KeyError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"path: expected a checkpoint written by save_gpt, but {path} is not one ({error})"
        ) from error
    return model
