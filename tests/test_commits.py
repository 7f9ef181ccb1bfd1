"""The task of notebook 12: what an episode was, what the tool answers, and what can be known."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from minigrpo.arithmetic import ANSWER, END_ANSWER, EOS
from minigrpo.sampling import ended
from minigrpo.turns import commits
from minigrpo.turns.commits import BAD, CALL, END_CALL, END_RESULT, ERROR, GOOD, RESULT, Bisect

PROMPT = commits.draw_prompts(1, torch.Generator().manual_seed(0))[0]
CULPRIT = commits.first_bad(PROMPT)


def written(text: str) -> tuple[Tensor, Tensor]:
    """Ids and authors of an episode as one reads it; the tool's words are in brackets."""
    ids, own, by_tool = [], [], False
    for word in text.split():
        by_tool |= word.startswith("[")
        ids.append(commits.VOCABULARY.index(word.strip("[]")))
        own.append(not by_tool)
        by_tool &= not word.endswith("]")
    return torch.tensor(ids), torch.tensor(own)


def read(text: str) -> commits.Episode:
    return commits.read_episode(*written(text))


TWO = "<call> 7 </call> [<result> bad </result>] <call> 3 </call> [<result> good </result>] "
END = "<answer> 5 </answer> </s>"


def test_an_episode_is_read_from_its_tokens_and_their_authors():
    e = read(TWO + END)
    assert (e.calls, e.forged, e.answer) == ([(7, True), (3, False)], 0, 5)
    assert e.bits == [1.0, 1.0] and (e.low, e.high) == (4, 7)
    again = read(TWO + "<call> 7 </call> [<result> bad </result>] " + END)
    assert again.bits[-1] == 0  # it was known
    assert read("<call> 2 </call> [<result> error </result>] " + END).calls == []


@pytest.mark.parametrize(
    "end",
    ["", "<answer> 5 </answer>", "<answer> good </answer> </s>", f"<answer> 5 {END}"]
    + ["<answer> 5 </answer> [</s>]", "[<answer> 5 </answer>] </s>", "5 </answer> </s>"],
)
def test_what_is_no_answer(end):
    assert read(TWO + end).answer is None


def test_a_result_that_the_policy_writes_tells_nothing():
    e = read("<call> 14 <result> good </result> <answer> 15 </answer> </s>")
    assert (e.calls, e.forged, e.answer, e.low) == ([], 1, 15, 0)


def test_the_reward_is_for_the_commit_and_a_closed_call_has_its_price():
    right = written(TWO + f"<answer> {CULPRIT} </answer> </s>")
    wrong = written(TWO + f"<answer> {CULPRIT - 1} </answer> </s>")
    forged = written(f"<call> 3 <result> good </result> <answer> {CULPRIT} </answer> </s>")
    ids, own = zip(right, wrong, forged)
    assert Bisect().reward([PROMPT] * 3, ids, own) == [1.0, 0.0, 1.0]
    assert Bisect(cost=0.25).reward([PROMPT] * 3, ids, own) == [0.5, -0.5, 1.0]


# the tool ------------------------------------------------------------------------------------


def called(commit: int) -> Tensor:
    return torch.tensor([CALL, commit, END_CALL])


def test_the_tool_tells_good_from_bad():
    said = [Bisect().reply(PROMPT, called(commit)) for commit in range(16)]
    assert said == [[RESULT, GOOD, END_RESULT]] * CULPRIT + [[RESULT, BAD, END_RESULT]] * (
        16 - CULPRIT
    )


def test_an_error_is_an_answer_too():
    def raises(prompt: Tensor, commit: int) -> bool:
        raise OSError("no such repository")

    def hangs(prompt: Tensor, commit: int) -> bool:
        time.sleep(30)
        return True

    error = [RESULT, ERROR, END_RESULT]
    for malformed in ([END_CALL], [CALL, GOOD, END_CALL], [3, 3, END_CALL]):
        assert Bisect().reply(PROMPT, torch.tensor(malformed)) == error
    assert Bisect(tool=raises).reply(PROMPT, called(3)) == error
    began = time.monotonic()
    assert Bisect(tool=hangs, patience=0.05).reply(PROMPT, called(3)) == error
    assert time.monotonic() - began < 10


class Script(torch.nn.Module):
    """A policy that calls for commit 7 for ever."""

    def forward(self, ids: Tensor, **kwargs):
        place = (ids.shape[1] - len(PROMPT)) % commits.CALL_TOKENS
        wanted = [CALL, 7, END_CALL, 0, 0, 0][place]
        logits = torch.full((*ids.shape, 32), -50.0)
        logits[..., wanted] = 50.0
        return type("Output", (), {"logits": logits, "past_key_values": None})()


@pytest.mark.parametrize("room", [28, 29, 33])
def test_a_reply_that_does_not_fit_ends_the_episode_as_truncated(room):
    r = commits.play(Script(), Bisect(), [PROMPT], max_new_tokens=room, use_cache=False)
    assert r.completions.shape == (1, room) and r.completion_mask.all()
    assert not ended(r, EOS).any()
    e = commits.read_episode(r.completions[0], r.own[0])
    assert e.answer is None and len(e.calls) == (room + 1) // 6
    assert r.own[0].tolist() == [t % 6 < 3 for t in range(room)]


# what can be known ---------------------------------------------------------------------------


def test_k_calls_are_worth_at_most_2_to_the_k_in_16():
    assert [commits.best(16, k) for k in range(6)] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.0]

    def first(t: int) -> float:  # with perfect play after it
        return ((t + 1) * commits.best(t + 1, 3) + (15 - t) * commits.best(15 - t, 3)) / 16

    assert [first(t) for t in (4, 5, 6, 7)] == [0.8125, 0.875, 0.9375, 1.0]


def test_a_perfect_bisector_gets_all_of_it():
    """Played by hand through the same reading."""
    right = 0
    for prompt in commits.draw_prompts(64, torch.Generator().manual_seed(1)):
        low, high, ids, own = 0, 15, [], []
        while low < high:
            call = called((low + high) // 2)
            reply = Bisect().reply(prompt, call)
            ids, own = [*ids, *call.tolist(), *reply], [*own, *[True] * 3, *[False] * 3]
            e = commits.read_episode(torch.tensor(ids), torch.tensor(own))
            low, high = e.low, e.high
        ids, own = [*ids, ANSWER, low, END_ANSWER, EOS], [*own, *[True] * 4]
        right += Bisect().grade(prompt, torch.tensor(ids), torch.tensor(own))
        assert e.bits == [1.0] * 4
    assert right == 64


def test_the_split_is_by_repository_and_the_culprits_are_even():
    g = torch.Generator().manual_seed(0)
    train, held = commits.draw_prompts(2000, g), commits.draw_prompts(500, g, held_out=True)
    assert not {tuple(p.tolist()) for p in train} & {tuple(p.tolist()) for p in held}
    found = torch.bincount(torch.tensor([commits.first_bad(p) for p in train]), minlength=16)
    assert len(found) == 16 and found.min() > 80


# the base ------------------------------------------------------------------------------------


def test_documents_are_careless_and_end_in_a_commit_that_is_open():
    g = torch.Generator().manual_seed(0)
    stops = 0
    for _ in range(300):
        ids = commits.demonstration(g, stop=0.5, forged=0.0)
        own = [not (token in (RESULT, GOOD, BAD, END_RESULT)) for token in ids]
        e = commits.read_episode(torch.tensor(ids), torch.tensor(own))
        assert e.low <= e.answer <= e.high and all(bits > 0 for bits in e.bits)
        stops += not e.calls
    assert 100 < stops < 200
    ids, mask = commits.warmup_batch(8, g, forged=1.0)
    assert END_CALL not in ids and (ids == RESULT).any() and mask.any(dim=1).all()
