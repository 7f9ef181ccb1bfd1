"""Sampling: the recorded log-probs are the scorer's, the frequencies are the distribution's."""

import math
from collections import Counter

import pytest
import torch
from support import Bigram, successor, tiny_gpt, tiny_llama, uniform
from torch import Tensor
from torch.testing import assert_close

from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.logprobs import next_token_log_probs, token_log_probs
from minigrpo.sampling import Rollouts, completion_mask, is_stop, left_pad, sample, stop_ids

NAN, INF = math.nan, math.inf

ALL_SETTINGS = ({}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8})
ALL_SETTINGS += ({"temperature": 1.5, "top_k": 6, "top_p": 0.7},)
RAGGED = left_pad([torch.tensor(p) for p in ([3, 1, 4, 1, 5], [9], [2, 6, 5], [8, 9, 7, 9], [4])])
EOS = 10


def rollouts(model, seed: int = 0, **settings) -> Rollouts:
    """Completions of the ragged prompts, some of which end early."""
    generator = torch.Generator().manual_seed(seed)
    settings = {"max_new_tokens": 9, "eos_id": EOS, "generator": generator, **settings}
    return sample(model, *RAGGED, **settings)


def test_recorded_log_probs_are_those_of_the_scorer():
    for model in (tiny_gpt(), tiny_llama()):
        for settings in ALL_SETTINGS:
            r = rollouts(model, **settings)
            assert len(set(r.completion_mask.sum(dim=1).tolist())) > 1  # rows end at other times
            scores = token_log_probs(model, r.input_ids, r.attention_mask, **settings)
            scores = scores[:, r.prompt_ids.shape[1] - 1 :]
            assert_close(r.log_probs, scores, atol=1e-10, rtol=0)
            assert not r.log_probs.requires_grad


def test_sample_keeps_the_first_eos_and_nothing_after_it():
    prompts = torch.tensor([[4], [2], [0]])  # of a policy that counts; 5 is EOS
    for pad in (0, 5):
        r = sample(successor(6), prompts, max_new_tokens=8, eos_id=5, pad_id=pad)
        text = [[5, pad, pad, pad, pad], [3, 4, 5, pad, pad], [1, 2, 3, 4, 5]]
        assert r.completions.tolist() == text
        assert r.completion_mask.sum(dim=1).tolist() == [1, 3, 5]
        assert torch.equal(r.completion_mask, completion_mask(r.completions, eos_id=5))


@pytest.mark.parametrize(
    ("eos_id", "ids"), [(None, ()), (5, (5,)), ([5, 7], (5, 7)), ((7,), (7,)), ([], ())]
)
def test_none_one_or_several_tokens_may_end_a_completion(eos_id, ids):
    assert stop_ids(eos_id) == ids
    assert is_stop(torch.arange(9), eos_id).nonzero().flatten().tolist() == list(ids)


@pytest.mark.parametrize("eos_id", ["</s>", 1.5, [1, "a"], [None]])
def test_what_is_no_token_id(eos_id):
    with pytest.raises(TypeError, match="eos_id: expected a token id, several, or None, got"):
        stop_ids(eos_id)
    for name in ("eos_id", "call_id"):
        with pytest.raises(TypeError, match=f"{name}: expected a token id"):
            GRPOConfig(**{name: eos_id})


def test_each_row_ends_at_the_first_of_several():
    prompts = torch.tensor([[1], [5], [6]])
    r = sample(successor(10), prompts, max_new_tokens=6, eos_id=(4, 8), pad_id=0)
    assert r.completions.tolist() == [[2, 3, 4], [6, 7, 8], [7, 8, 0]]
    assert r.completion_mask.sum(1).tolist() == [3, 3, 2]
    assert torch.equal(r.completion_mask, completion_mask(r.completions, (4, 8)))


def test_the_loop_knows_several_too():
    class Task:
        def prompts(self, n, generator):
            return [torch.tensor([1]), torch.tensor([5])]

        def reward(self, prompts, completions):
            return [float(len(completion)) for completion in completions]

    settings = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6, "check": False}
    for eos_id, truncated, length in (((4, 8), 0, 3), (4, 0.5, 4.5)):
        config = GRPOConfig(steps=1, eos_id=eos_id, **settings)
        (step,) = train_grpo(successor(10, high=100.0, low=0.0), Task(), config)
        assert (step.truncated, step.mean_length) == (truncated, length)


def test_rows_that_have_ended_are_no_longer_read():
    model = successor(6)
    sample(model, torch.tensor([[4], [2], [0]]), max_new_tokens=8, eos_id=5)
    assert [len(ids) for ids in model.read] == [3, 2, 2, 1, 1]  # and then nothing


def test_with_the_cache_a_step_reads_only_the_newest_token():
    model, lengths = tiny_gpt(), []
    model.token_embedding.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape))
    sample(model, *RAGGED, max_new_tokens=4)
    assert lengths == [(5, 5), (5, 1), (5, 1), (5, 1)]


def test_a_policy_that_keeps_no_cache_reads_the_whole_text_at_every_step():
    model = successor(6)
    sample(model, torch.tensor([[1, 2], [2, 3]]), max_new_tokens=3)
    assert [ids.tolist()[0] for ids in model.read] == [[1, 2], [1, 2, 3], [1, 2, 3, 4]]


def exact(table: Tensor, start: int, length: int, eos: int, **settings) -> dict[tuple, float]:
    """The probability of every completion, by enumeration; test_logprobs.py has that of a token."""
    probs = next_token_log_probs(table, **settings).exp().tolist()
    done: dict[tuple, float] = {}
    unfinished = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in unfinished.items():
            for token, p in enumerate(probs[text[-1] if text else start]):
                if p:
                    side = done if token == eos else longer
                    side[(*text, token)] = probability * p
        unfinished = longer
    return done | unfinished


def test_frequencies_are_those_of_the_enumerated_distribution():
    table, rows, eos = 2 * uniform(4, 4, seed=1), 10_000, 3
    prompts = torch.zeros(rows, 1, dtype=torch.long)
    for settings in ALL_SETTINGS:
        generator = torch.Generator().manual_seed(1)
        r = sample(
            Bigram(table), prompts, max_new_tokens=3, eos_id=eos, generator=generator, **settings
        )
        lengths = r.completion_mask.sum(dim=1).tolist()
        texts = [tuple(row[:n]) for row, n in zip(r.completions.tolist(), lengths)]
        counts, expected = Counter(texts), exact(table, 0, length=3, eos=eos, **settings)
        assert set(counts) <= set(expected)
        for text, p in expected.items():
            standard_error = math.sqrt(p * (1 - p) / rows)
            assert abs(counts[text] / rows - p) <= 4 * standard_error, (settings, text)


def test_the_generator_decides_the_text_and_nothing_else_does():
    model = tiny_gpt()
    before = torch.get_rng_state()
    first = rollouts(model, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    again = rollouts(model, seed=0)
    assert all(torch.equal(x, getattr(again, name)) for name, x in vars(first).items())
    assert not torch.equal(rollouts(model, seed=1).completions[:, :2], first.completions[:, :2])


def test_what_sampling_leaves_behind_can_be_read_by_a_loss():
    """A tensor of inference mode may not be saved for the backward pass."""
    model, made = tiny_llama(), []
    model.model.rotary_emb.register_forward_hook(lambda module, given, table: made.extend(table))
    rolled = sample(model, torch.tensor([[1, 2]]), max_new_tokens=3)
    left = [*vars(rolled).values(), *made[:2]]  # the sines and cosines of the first pass
    assert len(left) == 8 and not any(value.is_inference() for value in left)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_recorded_in_float32(half):
    table = uniform(6, 6).to(half)
    r = sample(Bigram(table), torch.tensor([[1, 2]]), max_new_tokens=4)
    expected = table.float().log_softmax(-1)[r.input_ids[:, 1:-1], r.completions]
    assert r.log_probs.dtype == torch.float32
    assert_close(r.log_probs, expected)


def test_rollouts_move_whole():
    r = Rollouts(*(torch.ones(2, 3) for _ in range(6)))
    moved = r.to("meta")
    assert {field.device.type for field in vars(moved).values()} == {"meta"}
    assert {field.device.type for field in vars(r).values()} == {"cpu"}


def test_prompts_may_be_whole_numbers_of_32_bits():
    ids = torch.tensor([[1, 2], [3, 4]])
    options = {"max_new_tokens": 4, "completions_per_prompt": 2}
    long, short = (
        sample(tiny_gpt(), prompts, generator=torch.Generator().manual_seed(0), **options)
        for prompts in (ids, ids.int())
    )
    assert torch.equal(long.completions, short.completions)
    assert_close(token_log_probs(tiny_gpt(), short.input_ids)[:, 1:], short.log_probs)
    with pytest.raises(RuntimeError, match="indices"):  # and nothing else
        sample(tiny_gpt(), ids + 0.5, **options)


def test_the_prompts_of_the_caller_stay_as_they_were():
    ids, mask = (tensor.clone() for tensor in RAGGED)
    sample(tiny_gpt(), ids, mask, max_new_tokens=3, pad_id=9)
    assert torch.equal(ids, RAGGED[0]) and torch.equal(mask, RAGGED[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, "temperature: expected a finite number above 0, got 0 .*top_k=1"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number of 1 or more, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens: expected a whole number of 1 or more, got 2.0"),
        ({"completions_per_prompt": 0}, "completions_per_prompt: expected .*, got 0"),
        ({"completions_per_prompt": 2.0}, "completions_per_prompt: expected .*, got 2.0"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_before_anything_is_read(settings, message):
    model = successor(6)
    with pytest.raises(ValueError, match=message):
        sample(model, torch.tensor([[1]]), **{"max_new_tokens": 2, **settings})
    assert model.read == []


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1]], r"attention_mask: expected shape \(2, 2\), got \(1, 2\)"),
        ([[1, 1], [1, 0]], "attention_mask: expected padding on the left"),
        ([[0, 0], [1, 1]], "attention_mask: expected padding on the left"),
    ],
    ids=["shape", "right padding", "empty prompt"],
)
def test_masks_that_do_not_fit_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        sample(successor(6), torch.ones(2, 2).long(), torch.tensor(mask), max_new_tokens=2)


@pytest.mark.parametrize(("prompt", "new"), [(30, 1), (24, 1), (20, 5)])
def test_text_longer_than_the_context_is_refused(prompt, new):
    ids, mask = left_pad([torch.ones(1).long(), torch.ones(prompt).long()])  # the longer one counts
    message = f"room for {new} new tokens in the context of 24, got prompts of {prompt}"
    with pytest.raises(ValueError, match=f"prompt_ids: expected {message}"):
        sample(tiny_gpt(context=24), ids, mask, max_new_tokens=new)


def test_padding_does_not_count_towards_the_context():
    ids, mask = left_pad([torch.ones(20).long()])
    ids = torch.cat([torch.zeros(1, 9).long(), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 9).bool(), mask], dim=1)
    assert sample(tiny_gpt(context=24), ids, mask, max_new_tokens=4).completions.shape == (1, 4)


class Forgetful(torch.nn.Module):
    """A model that keeps no cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, **options):
        return self.model(ids, **options | {"use_cache": False})


def test_prompts_read_once_are_continued_as_if_each_row_had_its_own():
    for model in (tiny_gpt().double(), tiny_llama().double(), Bigram(uniform(11, 11))):
        for policy in (model, Forgetful(model)):
            together = rollouts(policy, completions_per_prompt=3)
            ids, mask = (x.repeat_interleave(3, dim=0) for x in RAGGED)
            generator = torch.Generator().manual_seed(0)
            settings = {"max_new_tokens": 9, "eos_id": EOS, "generator": generator}
            apart = sample(model, ids, mask, **settings)
            assert torch.equal(together.prompt_ids, apart.prompt_ids)
            assert torch.equal(together.prompt_mask, apart.prompt_mask)
            assert torch.equal(together.completions, apart.completions)
            assert torch.equal(together.completion_mask, apart.completion_mask)
            assert_close(together.log_probs, apart.log_probs, atol=1e-6, rtol=0)


def test_each_prompt_is_read_once():
    model, read = tiny_gpt(), []
    model.register_forward_pre_hook(lambda module, args: read.append(tuple(args[0].shape)))
    sample(model, *RAGGED, max_new_tokens=3, completions_per_prompt=4)
    assert read == [(5, 5), (20, 1), (20, 1)]
