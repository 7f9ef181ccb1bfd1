"""Several tokens may end a completion: chat models have one for the turn and one for the text."""

from __future__ import annotations

import pytest
import torch
from support import Bigram, successor

from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.sampling import completion_mask, is_stop, sample, stop_ids


def counting() -> Bigram:
    """After token t comes t + 1, for certain."""
    return successor(10, high=100.0, low=0.0)


@pytest.mark.parametrize(
    ("eos_id", "ids"), [(None, ()), (5, (5,)), ([5, 7], (5, 7)), ((7,), (7,)), ([], ())]
)
def test_none_one_or_several(eos_id, ids):
    assert stop_ids(eos_id) == ids
    assert is_stop(torch.arange(9), eos_id).nonzero().flatten().tolist() == list(ids)


@pytest.mark.parametrize("eos_id", ["</s>", 1.5, [1, "a"], [None]])
def test_what_is_no_token_id(eos_id):
    with pytest.raises(TypeError, match="eos_id: expected a token id, several, or None, got"):
        stop_ids(eos_id)
    with pytest.raises(TypeError, match="eos_id"):
        GRPOConfig(eos_id=eos_id)


def test_each_row_ends_at_the_first_of_them():
    prompts = torch.tensor([[1], [5], [6]])
    r = sample(counting(), prompts, max_new_tokens=6, eos_id=(4, 8), pad_id=0)
    assert r.completions.tolist() == [[2, 3, 4], [6, 7, 8], [7, 8, 0]]
    assert r.completion_mask.sum(1).tolist() == [3, 3, 2]
    assert torch.equal(r.completion_mask, completion_mask(r.completions, (4, 8)))


def test_the_loop_knows_them_too():
    class Task:
        def prompts(self, n, generator):
            return [torch.tensor([1]), torch.tensor([5])]

        def reward(self, prompts, completions):
            return [float(len(completion)) for completion in completions]

    settings = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6, "check": False}
    (step,) = train_grpo(counting(), Task(), GRPOConfig(steps=1, eos_id=(4, 8), **settings))
    assert step.truncated == 0 and step.mean_length == 3
    (step,) = train_grpo(counting(), Task(), GRPOConfig(steps=1, eos_id=4, **settings))
    assert step.truncated == 0.5 and step.mean_length == 4.5
