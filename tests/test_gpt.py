"""The GPT: nothing reads the future, the cache and padding change nothing, files come back."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file
from support import tiny_gpt
from torch.testing import assert_close
from train_models import save_gpt

from minigrpo.gpt import (
    GPT,
    GPTConfig,
    MultiHeadAttention,
    load_gpt,
    sinusoids,
)

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8], [0, 0, 0, 5, 7, 7, 2, 1]])
LEFT = torch.tensor([[1] * 8, [0] + [1] * 7, [0, 0, 0] + [1] * 5])  # a mask for them


def close(actual, expected):
    """Equal to ten digits: everything here is computed in float64."""
    assert_close(actual, expected, atol=1e-10, rtol=0)


def test_the_weights_start_small_and_those_that_add_to_the_stream_smaller():
    torch.manual_seed(0)
    for name, weight in GPT(GPTConfig()).named_parameters():
        if name == "position_embedding.weight":
            assert_close(weight.detach(), 0.1 * sinusoids(256, 192))
        elif weight.dim() == 2:  # with two blocks, four results are added up
            adds = name.endswith(("out.weight", "down.weight"))
            assert weight.std().item() == pytest.approx(0.01 if adds else 0.02, rel=0.03), name


def test_sinusoids_are_waves_from_one_radian_a_position_downwards():
    waves = sinusoids(50, 6)
    assert waves.shape == (50, 6)
    assert_close(waves[:, 0], torch.arange(50.0).sin())
    assert_close(waves[:, 3], torch.arange(50.0).cos())
    assert_close(waves[:, 1], (torch.arange(50.0) / 10_000 ** (2 / 6)).sin())
    assert sinusoids(4, 5).shape == (4, 5)


def test_a_later_token_changes_no_earlier_logit():
    model = tiny_gpt()
    logits = model(IDS).logits
    for place in range(8):
        changed = IDS.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        difference = (model(changed).logits - logits).abs().amax(dim=(0, 2))
        assert (difference[:place] < 1e-12).all()
        assert (difference[place:] > 1e-6).all()


def test_attention_is_softmax_of_scaled_products_times_values():
    config = GPTConfig(width=12, num_heads=3)
    torch.manual_seed(0)
    attention = MultiHeadAttention(config).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    heads = []
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        q, k, v = (
            x @ linear.weight[part].T
            for linear in (attention.query, attention.key, attention.value)
        )
        scores = q @ k.transpose(1, 2) / math.sqrt(4)
        future = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
    close(attention(x), torch.cat(heads, dim=-1) @ attention.out.weight.T)


def test_padding_on_the_left_changes_nothing_and_makes_no_gradient_nan():
    model = tiny_gpt()
    logits = model(IDS, LEFT).logits
    for row, mask in enumerate(LEFT.bool()):
        close(logits[row, mask], model(IDS[row, mask][None]).logits[0])
    assert logits.isfinite().all()
    logits[LEFT.bool()].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_reading_in_pieces_with_the_cache_equals_one_pass():
    model = tiny_gpt()
    for mask in (None, LEFT):
        whole = model(IDS, mask).logits
        for pieces in ([1] * 8, [3, 2, 3], [7, 1], [8]):
            cache, end, logits = None, 0, []
            for length in pieces:
                start, end = end, end + length
                seen = None if mask is None else mask[:, :end]
                output = model(IDS[:, start:end], seen, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits.append(output.logits)
            assert cache.get_seq_length() == 8
            close(torch.cat(logits, dim=1), whole)


def test_positions_given_by_the_caller_are_used():
    model = tiny_gpt()
    later = model(IDS, position_ids=torch.arange(8)[None] + 5).logits
    padded = torch.cat([IDS[:, :1].expand(-1, 5), IDS], dim=1)
    seen = torch.ones_like(padded)
    seen[:, :5] = 0
    positions = torch.arange(13)[None].expand(3, -1)
    close(later, model(padded, seen, positions).logits[:, 5:])
    assert (later - model(IDS).logits).abs().max() > 1e-3


def test_a_mask_that_forgets_the_cached_tokens_is_refused():
    model = tiny_gpt()
    cache = model(IDS, use_cache=True).past_key_values
    message = r"attention_mask: expected shape \(3, 9\), got \(3, 1\)"
    with pytest.raises(ValueError, match=message):
        model(IDS[:, :1], torch.ones(3, 1), past_key_values=cache)


def test_a_sequence_of_the_context_fits_and_one_more_token_does_not():
    model = tiny_gpt(context=8)
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="input_ids: expected at most 8 tokens, got 9"):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="input_ids: expected at most 8 tokens, got 9"):
        model(IDS[:, :1], past_key_values=cache, use_cache=True)  # cached tokens count


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 0.0), (torch.float16, 1e-3)], ids=str)
def test_weights_come_back_from_a_file(tmp_path, dtype, atol):
    model = tiny_gpt(std=0.1).float()
    save_gpt(model, tmp_path / "model.safetensors", dtype)
    loaded = load_gpt(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    for name, weight in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == torch.float32
        assert_close(loaded.state_dict()[name], weight, atol=atol, rtol=atol, msg=name)
    assert_close(loaded(IDS).logits, model(IDS).logits, atol=50 * atol, rtol=0)


def test_a_file_of_other_sizes_is_refused(tmp_path):
    path, model = tmp_path / "model.safetensors", tiny_gpt()
    sizes = json.dumps({**asdict(model.config), "width": 32})
    save_file(model.state_dict(), path, metadata={"config": sizes})
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_gpt(path)
