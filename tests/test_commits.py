"""The task of notebook 12: what an episode was, what the tool answers, and what can be known."""

import time

import pytest
import torch
from torch import Tensor

from minigrpo.arithmetic import ANSWER, END_ANSWER, EOS
from minigrpo.files import data_folder
from minigrpo.llama import load_policy
from minigrpo.sampling import ended
from minigrpo.turns import commits
from minigrpo.turns.commits import BAD, CALL, END_CALL, END_RESULT, ERROR, GOOD, RESULT, Bisect

PROMPT = commits.draw_prompts(1, torch.Generator().manual_seed(0))[0]
CULPRIT = commits.first_bad(PROMPT)


TWO = "<call> 7 </call> [ <result> bad </result> ] <call> 3 </call> [ <result> good </result> ] "
END = "<answer> 5 </answer> </s>"
FORGED = "<call> 14 <result> good </result> "


def written(text: str) -> tuple[Tensor, Tensor]:
    """Ids and authors of an episode; what the tool wrote is in brackets."""
    words = [(word, part % 2) for part, some in enumerate(text.replace("]", "[").split("["))
             for word in some.split()]  # fmt: skip
    ids = [commits.VOCABULARY.index(word) for word, _ in words]
    return torch.tensor(ids), torch.tensor([not tool for _, tool in words])


def read(text: str) -> commits.Episode:
    return commits.read_episode(*written(text))


def test_an_episode_is_read_from_its_tokens_and_their_authors():
    e = read(TWO + END)
    assert (e.calls, e.bits, e.forged, e.answer) == ([(7, True), (3, False)], [1.0, 1.0], 0, 5)
    assert e.open == (4, 7) and commits.to_text(written(END)[0]) == END
    assert read(TWO + "<call> 7 </call> [<result> bad </result>] ").bits[-1] == 0  # it was known
    assert read("<call> 2 </call> [<result> error </result>] " + END).calls == []
    e = read(FORGED + END)  # what the policy itself writes tells nothing
    assert (e.calls, e.forged, e.answer, e.open) == ([], 1, 5, (0, 15))


@pytest.mark.parametrize(
    "end",
    ["", "<answer> 5 </answer>", "<answer> good </answer> </s>", f"<answer> 5 {END}"]
    + ["<answer> 5 </answer> [</s>]", "[<answer> 5 </answer>] </s>", "5 </answer> </s>"],
)
def test_what_is_no_answer(end):
    assert read(TWO + end).answer is None


def test_the_reward_is_for_the_commit_and_a_closed_call_has_its_price():
    right, wrong = (f"<answer> {commit} </answer> </s>" for commit in (CULPRIT, CULPRIT - 1))
    ids, own = zip(*map(written, (TWO + right, TWO + wrong, FORGED + right)))
    assert Bisect().reward([PROMPT] * 3, ids, own) == [1.0, 0.0, 1.0]
    assert Bisect(cost=0.25).reward([PROMPT] * 3, ids, own) == [0.5, -0.5, 1.0]


def test_the_tool_tells_good_from_bad():
    said = [Bisect().reply(PROMPT, torch.tensor([CALL, c, END_CALL])) for c in range(16)]
    right = [GOOD] * CULPRIT + [BAD] * (16 - CULPRIT)
    assert said == [[RESULT, word, END_RESULT] for word in right]


def raises(prompt: Tensor, commit: int) -> bool:
    raise OSError("no such repository")


def hangs(prompt: Tensor, commit: int) -> bool:
    return bool(time.sleep(30))


@pytest.mark.parametrize(
    ("call", "tool"),
    [([END_CALL], commits.is_bad), ([CALL, GOOD, END_CALL], commits.is_bad)]
    + [([3, 3, END_CALL], commits.is_bad), ([CALL, 3, END_CALL], raises)]
    + [([CALL, 3, END_CALL], hangs)],
)
def test_a_malformed_call_and_a_tool_that_fails_or_hangs_give_an_error_to_read(call, tool):
    began, task = time.monotonic(), Bisect(tool=tool, patience=0.05)
    assert task.reply(PROMPT, torch.tensor(call)) == [RESULT, ERROR, END_RESULT]
    assert time.monotonic() - began < 10


class Script(torch.nn.Module):
    """A policy that calls for ever, and tests commit 7."""

    def forward(self, ids: Tensor, **kwargs):
        wanted = [CALL, 7, END_CALL, 0, 0, 0][(ids.shape[1] - len(PROMPT)) % 6]
        logits = torch.full((*ids.shape, 32), -50.0)
        logits[..., wanted] = 50.0
        return type("Output", (), {"logits": logits, "past_key_values": None})()


@pytest.mark.parametrize("room", [28, 29, 33])
def test_a_reply_that_does_not_fit_ends_the_episode_as_truncated(room):
    r = commits.play(Script(), Bisect(), [PROMPT], max_new_tokens=room)
    assert r.completions.shape == (1, room) and r.completion_mask.all()
    assert not ended(r, EOS).any() and r.own[0].tolist() == [t % 6 < 3 for t in range(room)]
    e = commits.read_episode(r.completions[0], r.own[0])
    assert e.answer is None and len(e.calls) == (room + 1) // 6


def test_every_copy_of_a_prompt_is_answered_of_its_own_repository():
    asked, prompts = [], commits.draw_prompts(2, torch.Generator().manual_seed(0))
    task = Bisect(tool=lambda prompt, commit: asked.append(prompt))
    commits.play(Script(), task, prompts, completions_per_prompt=2, max_new_tokens=4)
    assert [p.tolist() for p in asked] == [p.tolist() for p in prompts for _ in range(2)]
    assert commits.evaluate(Script(), n=2, completions_per_prompt=2)["calls"] == 4


def test_exact_values():
    """Of k calls, of a first test, of the careless tester, and of a call."""
    assert [commits.best(k=k) for k in range(6)] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.0]
    assert [commits.after(t + 1) for t in (4, 5, 6, 7)] == [0.8125, 0.875, 0.9375, 1.0]
    assert commits.careless(2) == (0.75, 0.5) and commits.careless(16, stop=0.0)[0] == 1.0
    assert commits.careless(16, 0.0, 1) == (pytest.approx(1 / 8), 1.0)
    assert commits.pays_up_to(1.0, 4) == 15 / 64
    assert commits.pays_up_to(*commits.careless()) == pytest.approx(0.1106, abs=1e-4)


def test_a_perfect_bisector_gets_all_of_it():
    for prompt in commits.draw_prompts(64, torch.Generator().manual_seed(1)):
        (low, high), ids, own = (0, 15), [], []
        while low < high:
            call = [CALL, (low + high) // 2, END_CALL]
            ids += [*call, *Bisect().reply(prompt, torch.tensor(call))]
            own += [True] * 3 + [False] * 3
            low, high = commits.read_episode(torch.tensor(ids), torch.tensor(own)).open
        ids, own = [*ids, ANSWER, low, END_ANSWER, EOS], [*own, *[True] * 4]
        assert Bisect().grade(prompt, torch.tensor(ids), torch.tensor(own)) == 1
        assert len(ids) == commits.RUN.max_new_tokens


def test_the_split_is_by_repository_and_the_culprits_are_even():
    g = torch.Generator().manual_seed(0)
    train, held = commits.draw_prompts(2000, g), commits.draw_prompts(500, g, held_out=True)
    assert not {tuple(p.tolist()) for p in train} & {tuple(p.tolist()) for p in held}
    found = [commits.first_bad(prompt) for prompt in train]
    assert all(found.count(commit) > 80 for commit in range(16))


@pytest.mark.parametrize(("name", "forged"), [("turns_llama", 0.0), ("turns_forger", 0.11)])
def test_what_ships_calls_now_and_then_and_guesses(name, forged):
    found = commits.evaluate(load_policy(data_folder() / name))
    careless, calls = commits.careless()
    assert found["accuracy"] == pytest.approx(careless, abs=0.05)
    assert found["calls"] == pytest.approx(calls, abs=0.1) and found["answered"] > 0.95
    assert found["forged"] == pytest.approx(forged, abs=0.03) and max(found["first"]) < 0.15
