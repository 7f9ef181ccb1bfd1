"""Several turns: a tool writes into the completions. What is read, and what is learned from."""

from dataclasses import replace

import pytest
import torch
from support import Bigram, must_fail_on, tiny_gpt, tiny_llama, uniform
from torch import Tensor, nn
from torch.testing import assert_close

from minigrpo import grpo
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.logprobs import completion_log_probs_and_entropy, token_log_probs
from minigrpo.objective import grpo_loss
from minigrpo.sampling import Rollouts, ended, left_pad, sample
from minigrpo.scaling.trl import trl_loss

CALL, EOS, ANSWER = 7, 10, 9  # ANSWER: a token that the tool writes, and prompts never hold
PROMPTS = [torch.tensor(p) for p in ([3, 1, 4], [2, 6], [5], [8, 1, 3])]
PADDED = {"prompts of one length": [p[-1:] for p in PROMPTS], "padded prompts": PROMPTS}
ENDS = {"max_new_tokens": 16, "eos_id": EOS, "call_id": CALL, "completions_per_prompt": 8}


def reply(row: int, completion: Tensor) -> list[int]:
    """Three tokens that depend on what was written before the call."""
    assert completion[-1] == CALL
    return [ANSWER, int(completion[-2]) % 5 if len(completion) > 1 else 0, ANSWER]


def rollouts(model: nn.Module, prompts=PROMPTS, answer=reply, seed: int = 0, **given) -> Rollouts:
    generator = torch.Generator().manual_seed(seed)
    settings = {**ENDS, "generator": generator, **given}
    return sample(model, *left_pad(prompts), reply=answer, **settings)


def scored(model: nn.Module, r: Rollouts) -> Tensor:
    log_probs, _ = completion_log_probs_and_entropy(model, *r.text)
    return log_probs.where(r.own, 0.0)


class Talk:
    """A task with a tool. It is paid for answers, whoever has written them."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[Tensor], list[Tensor]]] = []

    def prompts(self, n, generator):
        return [PROMPTS[int(torch.randint(4, (), generator=generator))] for _ in range(n)]

    def reply(self, prompt, completion):
        return [ANSWER, int(prompt[-1]) % 5]

    def reward(self, prompts, completions, own):
        self.seen.append((completions, own))
        pairs = zip(completions, own, strict=True)
        return [(ids[written] == 3).double().mean().item() for ids, written in pairs]


TALK = GRPOConfig(
    steps=2, prompts_per_step=4, group_size=8, max_new_tokens=12, eos_id=EOS, call_id=CALL, lr=1e-2,
    inner_epochs=2,
)  # fmt: skip


def test_every_call_is_answered_at_once_with_the_reply_to_its_own_row():
    def numbered(row, completion):
        return [ANSWER, row % 5, row // 5]

    r = rollouts(tiny_gpt(), answer=numbered)
    answered = 0
    for row, (ids, own) in enumerate(zip(r.completions.tolist(), r.own.tolist())):
        for t, token in enumerate(ids):
            if token == CALL and own[t]:
                room = len(ids[t + 1 : t + 4])
                assert ids[t + 1 : t + 4] == [ANSWER, row % 5, row // 5][:room]
                assert not any(own[t + 1 : t + 4])
                answered += room == 3
    assert answered >= 10 and (~r.own & r.completion_mask).sum() >= 3 * answered


def test_a_tool_that_writes_over_what_it_was_shown_changes_no_text():
    def scribble(row, completion):
        words = reply(row, completion)
        completion.zero_()
        return words

    assert torch.equal(
        rollouts(tiny_gpt(), answer=scribble).completions, rollouts(tiny_gpt()).completions
    )


def test_a_reply_has_seen_all_that_was_written_before_it():
    calls = []
    r = rollouts(tiny_gpt(), answer=lambda row, ids: calls.append((row, ids)) or [ANSWER])
    assert len(calls) > 10
    for row, ids in calls:
        assert torch.equal(ids, r.completions[row, : len(ids)])


def test_what_a_tool_writes_ends_nothing_and_calls_nothing():
    calls = []
    trap = [EOS, CALL, EOS]
    r = rollouts(tiny_gpt(), answer=lambda row, ids: calls.append(row) or trap)
    drawn = (r.completions == CALL) & r.own
    assert len(calls) == drawn.sum() > 10
    for ids, own in zip(r.completions, r.own):
        for t in ((ids == CALL) & own).nonzero()[:, 0].tolist():
            rest = ids[t + 1 : t + 4].tolist()
            assert rest == trap[: len(rest)] and not own[t + 1 : t + 4].any()


def test_a_row_that_ends_with_the_end_of_a_reply_has_not_ended():
    r = rollouts(tiny_gpt(), answer=lambda row, ids: [EOS] * 20)
    cut = ~r.own[:, -1] & r.completion_mask[:, -1]
    assert (r.completions[cut, -1] == EOS).all() and cut.any()
    assert not ended(r, EOS)[cut].any() and ended(r, EOS).any()


def test_a_reply_that_does_not_fit_is_cut_off():
    r = rollouts(tiny_gpt(), answer=lambda row, ids: [1] * 100)
    called = ((r.completions == CALL) & r.own).any(dim=1)
    assert called.any() and r.completion_mask[called].all() and r.completions.shape[1] == 16


@pytest.mark.parametrize("make", [tiny_gpt, tiny_llama])
@pytest.mark.parametrize("prompts", PADDED.values(), ids=PADDED)
def test_without_a_call_all_is_as_in_one_turn_to_the_bit(make, prompts):
    model = make()
    plain = rollouts(model, prompts, answer=None, call_id=None)
    silent = rollouts(model, prompts, answer=lambda row, ids: [])  # asked, and says nothing
    for name, values in vars(plain).items():
        assert torch.equal(values, getattr(silent, name)), name
    assert torch.equal(plain.own, plain.completion_mask)
    assert plain.text[2] is plain.completions and plain.text[3] is plain.completion_mask


@pytest.mark.parametrize("make", [tiny_gpt, tiny_llama])
@pytest.mark.parametrize("prompts", PADDED.values(), ids=PADDED)
def test_one_reading_of_the_finished_text_gives_the_sampled_log_probs(make, prompts):
    model = make()
    r = rollouts(model, prompts)
    assert (~r.own & r.completion_mask).sum() > 10
    assert bool(r.prompt_mask.all()) == (len({*map(len, prompts)}) == 1)
    assert_close(scored(model, r), r.log_probs, atol=1e-5, rtol=0)
    assert (r.log_probs[~r.own] == 0).all() and (r.log_probs[r.own] < 0).all()
    for row in range(len(r.own)):  # the same by hand: alone, without a cache and padding
        real, start = r.completion_mask[row], int(r.prompt_mask[row].sum())
        prompt = r.prompt_ids[row][r.prompt_mask[row]]
        alone = token_log_probs(model, torch.cat([prompt, r.completions[row][real]])[None])
        own = r.own[row][real]
        assert_close(alone[0, start - 1 :][own], r.log_probs[row][real][own], atol=1e-5, rtol=0)


def test_a_mask_with_a_hole_is_no_mask_to_read():
    """Passed for the completion mask, `own` would move positions, and hide the tool's words."""
    model, r = tiny_gpt(), rollouts(tiny_gpt())
    hole = (
        "expected real tokens in one piece, got a hole .* only the loss leaves them out, by `own`"
    )
    with pytest.raises(ValueError, match=f"completion_mask: {hole}"):
        completion_log_probs_and_entropy(model, *r.text[:3], r.own)
    with pytest.raises(ValueError, match=f"attention_mask: {hole}"):
        token_log_probs(model, r.input_ids, torch.cat([r.prompt_mask, r.own], dim=1))
    with pytest.raises(ValueError, match=f"attention_mask: {hole}"):
        sample(model, torch.ones(1, 3).long(), torch.tensor([[1, 0, 1]]), max_new_tokens=2)


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "constant"])
def test_the_gradient_is_0_at_a_tools_tokens_and_garbage_there_changes_no_bit(how):
    r = rollouts(tiny_gpt())
    A, tool = uniform(len(r.own)), ~r.own
    values, settings = r.log_probs - 0.3, {"how": how, "max_length": 16, "kl_weight": 0.1}
    results = []
    for garbage in (0.0, float("nan"), float("inf")):
        dirty = [x.where(r.own, garbage) for x in (values, r.log_probs, values + 0.1)]
        log_probs = dirty[0].clone().requires_grad_()
        terms = {"ref_log_probs": dirty[2], "entropy": -log_probs, "entropy_weight": 0.1}
        loss, _ = grpo_loss(log_probs, dirty[1], A, r.own, **terms, **settings)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert (gradient[tool] == 0).all() and (gradient[r.own] != 0).any()
        results.append((loss, gradient))
    for loss, gradient in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(gradient, results[0][1])


def test_the_gradient_flows_through_what_a_tool_has_written():
    """Its words are read: the embedding of a token that nobody else writes gets a gradient."""
    model = tiny_gpt()
    nobody = torch.zeros(11).scatter(0, torch.tensor(ANSWER), -1e9)  # but the tool writes it
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + nobody)
    r = rollouts(model)
    only_the_tool = (r.completions == ANSWER) & r.completion_mask
    assert not (only_the_tool & r.own).any() and only_the_tool.any()
    loss = scored(model, r).sum()
    (gradient,) = torch.autograd.grad(loss, model.token_embedding.weight)
    assert gradient[ANSWER].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("how", "loss_type"),
    [("sequence_mean", "grpo"), ("token_mean", "dapo"), ("constant", "dr_grpo")],
)
def test_loss_and_gradient_are_those_of_trl_with_its_tool_mask(how, loss_type):
    peer = pytest.importorskip("trl_peer")
    torch.manual_seed(0)
    N, T = 8, 12
    real = torch.arange(T) < torch.randint(5, T + 1, (N, 1))
    own = real & (torch.rand(N, T) < 0.6)
    own[:, 0] = True
    ours = (-torch.rand(N, T, dtype=torch.float64) * 3).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    old, ref = ours.detach() + 0.3 * torch.randn(2, N, T, dtype=torch.float64)
    A = torch.randn(N, dtype=torch.float64)

    trainer = peer.trl_trainer(
        peer.GRPOTrainer, loss_type=loss_type, beta=0.1, max_completion_length=T
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (theirs, theirs.detach(), None)
    ids = torch.zeros(N, T, dtype=torch.long)
    r = Rollouts(ids[:, :1], torch.ones(N, 1).bool(), ids, real, old, own)
    trainer.model.train = lambda: None  # it only scores here, by the line above
    expected = trl_loss(trainer, r, A, ref)
    terms = {"ref_log_probs": ref, "kl_weight": 0.1, "kl_correction": True}  # TRL's default
    loss, _ = grpo_loss(ours, old, A, own, how=how, max_length=T, **terms)
    assert_close(loss, expected, atol=1e-12, rtol=0)
    gradients = [
        torch.autograd.grad(value, x)[0] for value, x in ((loss, ours), (expected, theirs))
    ]
    assert_close(*gradients, atol=1e-12, rtol=0)
    assert (gradients[0][~own] == 0).all()


@pytest.mark.parametrize("make", [tiny_gpt, tiny_llama])
def test_the_loop_learns_from_the_policys_own_tokens_alone(make, monkeypatch):
    """The ratio begins at 1, and the loss gets `own` for its mask."""
    masks, task = [], Talk()

    def spy(log_probs, old_log_probs, advantages, mask, **settings):
        masks.append((mask, settings["whole"]))
        return grpo_loss(log_probs, old_log_probs, advantages, mask, **settings)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    steps = list(train_grpo(make(), task, replace(TALK, kl_weight=0.1)))
    for m, (completions, own), (mask, whole) in zip(steps, task.seen, masks[::2]):
        r = m.rollouts
        assert (~r.own & r.completion_mask).any() and torch.equal(mask, r.own)
        assert whole == (32, int(r.own.sum())) and m.ratio_min < 1 < m.ratio_max
        for row in range(32):
            real = r.completion_mask[row]
            assert torch.equal(completions[row], r.completions[row][real])
            assert torch.equal(own[row], r.own[row][real])
        assert m.mean_length == r.completion_mask.sum().item() / 32


@must_fail_on("others_tokens_scored")
def test_of_a_tools_tokens_log_probs_and_entropies_are_0():
    r = rollouts(tiny_gpt())
    for values in grpo.score(tiny_gpt(), r, TALK):
        assert (values[r.own] != 0).all() and (values[~r.own] == 0).all()


def test_one_process_or_several_turns_a_row_stays_what_it_was():
    r = rollouts(tiny_gpt())
    some = torch.tensor([1, 4])
    assert torch.equal(r[some].own, r.own[some]) and torch.equal(r.to("cpu").own, r.own)
    T = int(r.completion_mask[some].sum(dim=1).max())
    assert torch.equal(r[some].trimmed().own, r.own[some][:, :T])
    rows = r.unpadded(r.own)
    assert [len(row) for row in rows] == r.completion_mask.sum(dim=1).tolist()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"answer": None}, ValueError, "call_id: expected a reply to it"),
        ({"call_id": EOS}, ValueError, "call_id: expected .* no end of a text, got 10"),
        ({"call_id": (3, EOS)}, ValueError, "call_id: expected .* no end of a text"),
        ({"call_id": 7.0}, TypeError, "expected a token id, several, or None, got 7.0"),
        ({"answer": lambda row, ids: [1.5]}, TypeError, "reply: expected a token id, .*1.5"),
        ({"answer": lambda row, ids: torch.tensor([1.5])}, TypeError, "reply: .*1.5"),
        ({"answer": lambda row, ids: [-1]}, TypeError, "reply: expected a token id, .*-1"),
    ],
    ids="nobody-answers ends one-of-them-ends no-id half-a-token half-a-tensor negative".split(),
)
def test_calls_that_cannot_be_answered_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        rollouts(Bigram(uniform(11, 11)), **settings)
