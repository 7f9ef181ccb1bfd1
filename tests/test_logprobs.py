"""Log-probabilities: the right token, the right distribution, nothing from under the mask."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support import GARBAGE, Bigram, masks, saved_bytes, successor, tiny_gpt, tiny_llama, uniform
from torch import Tensor
from torch.testing import assert_close

from minigrpo import logprobs
from minigrpo.logprobs import (
    _score,
    completion_log_probs_and_entropy,
    masked_mean,
    next_token_log_probs,
    positions_from_mask,
    sequence_log_probs,
    token_entropy,
    token_log_probs,
)
from minigrpo.sampling import left_pad

NAN, INF = math.nan, math.inf

LOGITS = st.lists(st.integers(-64, 64), min_size=2, max_size=7).map(
    lambda eighths: torch.tensor(eighths, dtype=torch.float64) / 8  # ties are likely
)


@pytest.mark.parametrize("make", [tiny_gpt, tiny_llama])
def test_one_pass_equals_one_pass_per_token(make):
    model = make()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])
    one_by_one = [
        model(ids[:, :end]).logits[:, -1].log_softmax(-1).gather(1, ids[:, end : end + 1])
        for end in range(1, ids.shape[1])
    ]
    assert_close(token_log_probs(model, ids), torch.cat(one_by_one, dim=1), atol=1e-10, rtol=0)


def _log_probs_and_gradient(model, rows: list[tuple[Tensor, Tensor | None]]):
    """The real log-probs of each row, and the gradient of a function that weighs each otherwise."""
    model.zero_grad()
    real = []
    for ids, mask in rows:
        log_probs = token_log_probs(model, ids, mask)
        for row in range(len(ids)):
            pair = mask[row, 1:] & mask[row, :-1] if mask is not None else slice(None)
            real.append(log_probs[row, pair])
    sum(row.pow(2).sum() for row in real).backward()
    return real, [p.grad.clone() for p in model.parameters()]


def test_a_padded_row_scores_like_the_row_alone():
    texts = [torch.tensor(text) for text in ([3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9])]
    for model in (tiny_gpt(), tiny_llama()):
        expected = _log_probs_and_gradient(model, [(text[None], None) for text in texts])
        for left in (True, False):
            ids, mask = torch.full((3, 8), 7), torch.zeros(3, 8, dtype=torch.bool)
            for row, text in enumerate(texts):
                place = slice(8 - len(text), 8) if left else slice(0, len(text))
                ids[row, place], mask[row, place] = text, True
            padded = _log_probs_and_gradient(model, [(ids, mask)])
            assert_close(padded, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_scored_in_float32(half):
    table = uniform(6, 6).to(half)
    expected = table.float().log_softmax(-1)[[[0, 5]], [[5, 2]]]
    log_probs = token_log_probs(Bigram(table), torch.tensor([[0, 5, 2]]))
    assert log_probs.dtype == torch.float32
    assert_close(log_probs, expected)
    one, two = torch.ones(1, 1), torch.ones(1, 2)
    text = (torch.tensor([[0]]), one, torch.tensor([[5, 2]]), two)
    log_probs, entropy = completion_log_probs_and_entropy(Bigram(table), *text)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert_close(log_probs, expected)


@given(LOGITS, st.floats(0.2, 5))
def test_temperature_divides_the_logits(logits, temperature):
    weights = [math.exp(value / temperature) for value in logits.tolist()]
    expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    assert_close(next_token_log_probs(logits, temperature=temperature).exp(), expected)


@given(LOGITS, st.integers(1, 9))
def test_top_k_keeps_k_tokens_and_none_likelier_is_cut(logits, top_k):
    log_probs = next_token_log_probs(logits, top_k=top_k)
    kept = log_probs.isfinite()
    assert kept.sum() == min(top_k, len(logits))
    assert not (~kept).any() or logits[kept].min() >= logits[~kept].max()
    assert_close(log_probs[kept], logits[kept].log_softmax(-1))


@given(LOGITS, st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_tokens_that_reach_p(logits, top_p):
    probs = logits.softmax(-1)
    reached, fewest = 0.0, 0
    for p in sorted(probs.tolist(), reverse=True):
        assume(abs(reached - top_p) > 1e-9)
        if reached < top_p:
            reached, fewest = reached + p, fewest + 1
    log_probs = next_token_log_probs(logits, top_p=top_p)
    kept = log_probs.isfinite()
    assert kept.sum() == fewest
    assert_close(probs[kept].sum().item(), reached)
    assert_close(log_probs[kept], logits[kept].log_softmax(-1))


def test_top_p_takes_its_share_of_what_top_k_has_left():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    # Of the two tokens left, the first has 4/7 > 0.55; of all four it has 0.4 < 0.55.
    log_probs = next_token_log_probs(probs.log(), top_k=2, top_p=0.55)
    assert log_probs.tolist() == [0.0, -INF, -INF, -INF]


@given(masks(empty=False), GARBAGE)
def test_sequence_log_prob_is_the_sum_over_real_tokens(mask, garbage):
    values = uniform(*mask.shape)
    log_probs = values.masked_fill(~mask, garbage).requires_grad_()
    total = sequence_log_probs(log_probs, mask)
    total.sum().backward()
    expected = [
        sum(v for v, real in zip(row, keep) if real)
        for row, keep in zip(values.tolist(), mask.tolist())
    ]
    assert_close(total, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(log_probs.grad, mask.double())


@given(LOGITS)
def test_entropy_equals_the_sum_over_the_vocabulary(logits):
    probs = logits.softmax(-1).tolist()
    assert_close(token_entropy(logits).item(), -sum(p * math.log(p) for p in probs))


def test_entropy_gradient_agrees_with_finite_differences_where_tokens_are_impossible():
    def entropy(logits: Tensor) -> Tensor:
        impossible = torch.full((3, 1), -INF, dtype=torch.float64)
        return token_entropy(torch.cat([logits[:, :2], impossible, logits[:, 2:]], dim=1))

    logits = uniform(3, 4).requires_grad_()
    analytic = torch.autograd.grad(entropy(logits).sum(), logits)[0]
    for place in ((row, column) for row in range(3) for column in range(4)):
        step = torch.zeros_like(analytic)
        step[place] = 1e-6
        numeric = (entropy(logits + step) - entropy(logits - step)).sum() / 2e-6
        assert abs(numeric.item() - analytic[place].item()) < 1e-8


@given(masks(empty=False), GARBAGE)
def test_masked_mean_reads_only_what_the_mask_keeps(mask, garbage):
    assume(not mask.all())
    values = uniform(*mask.shape)
    garbled = values.masked_fill(~mask, garbage).requires_grad_()
    assert_close(masked_mean(garbled, mask), values[mask].mean())
    rows = torch.stack([row[keep].mean() for row, keep in zip(values, mask)])
    assert_close(masked_mean(garbled, mask.float(), dim=1), rows)
    masked_mean(garbled, mask).backward()
    assert_close(garbled.grad, mask.double() / mask.sum())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, "temperature: expected a finite number above 0, got 0 .*top_k=1"),
        ({"temperature": NAN}, "temperature: expected .*, got nan"),
        ({"temperature": INF}, "temperature: expected .*, got inf"),
        ({"top_k": 0}, "top_k: expected a whole number of 1 or more, got 0"),
        ({"top_k": 2.0}, "top_k: expected .*, got 2.0"),
        ({"top_k": True}, "top_k: expected .*, got True"),
        ({"top_p": 0}, r"top_p: expected a number in \(0, 1\], or None, got 0"),
        ({"top_p": 1.5}, "top_p: expected .*, got 1.5"),
        ({"top_p": NAN}, "top_p: expected .*, got nan"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        next_token_log_probs(torch.zeros(3), **settings)
    with pytest.raises(ValueError, match=message):
        token_log_probs(successor(3), torch.tensor([[0, 1]]), **settings)


@pytest.mark.parametrize("shape", [(4,), (1, 2, 3)], ids=str)
def test_token_log_probs_refuses_ids_that_are_no_batch_of_sequences(shape):
    with pytest.raises(ValueError, match=r"input_ids: expected \(N, S\), got \("):
        token_log_probs(successor(3), torch.zeros(shape, dtype=torch.long))


def test_logits_under_the_padding_may_be_anything():
    model = Bigram(torch.tensor([[NAN, NAN], [0.0, 0.0]]))
    log_probs = token_log_probs(model, torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 0, 1, 1]]))
    assert_close(log_probs, torch.tensor([[0.0, 0.0, -math.log(2)]]))


TWO_ROWS = torch.zeros(2, 3)
MASK_TAKERS = {
    "token_log_probs": lambda m: token_log_probs(successor(3), TWO_ROWS.long(), m),
    "sequence_log_probs": lambda m: sequence_log_probs(TWO_ROWS, m),
    "masked_mean": lambda m: masked_mean(TWO_ROWS, m),
}


@pytest.mark.parametrize("name", MASK_TAKERS)
@pytest.mark.parametrize("shape", [(2, 2), (3,), (2, 3, 1)], ids=str)
def test_a_mask_of_another_shape_is_refused(name, shape):
    got = r"\(" + ", ".join(map(str, shape))
    with pytest.raises(ValueError, match=rf"mask: expected shape \(2, 3\), got {got}"):
        MASK_TAKERS[name](torch.ones(shape))


@pytest.mark.parametrize("name", ["token_log_probs", "sequence_log_probs"])
def test_a_row_without_a_real_token_is_refused(name):
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    with pytest.raises(ValueError, match="mask: expected a real token in every row"):
        MASK_TAKERS[name](mask)


def test_whole_numbers_are_no_log_probs():
    with pytest.raises(TypeError, match="log_probs: expected floating point, got torch.int64"):
        sequence_log_probs(TWO_ROWS.long(), TWO_ROWS + 1)


PROMPTS = left_pad([torch.tensor(p) for p in ([3, 1, 4], [9, 5], [3, 1, 4], [0, 9, 5])])
LENGTHS = torch.tensor([4, 3, 1, 2])  # the padded prompt has tokens after its first one, too


def scored_twice(policy, prompts=PROMPTS):
    """The completions by way of their prompts, and the whole rows; with gradients."""
    ids, mask = prompts
    completions = torch.randint(10, (4, 4), generator=torch.Generator().manual_seed(0))
    real = torch.arange(4) < LENGTHS[:, None]
    apart = completion_log_probs_and_entropy(policy, ids, mask, completions, real, temperature=0.8)
    rows, seen = torch.cat([ids, completions], dim=1), torch.cat([mask, real], dim=1)
    positions = positions_from_mask(seen)
    logits = policy(rows, attention_mask=seen.long(), position_ids=positions).logits[:, -5:-1]
    entropy = torch.distributions.Categorical(logits=logits / 0.8).entropy()
    log_probs = token_log_probs(policy, rows, seen, temperature=0.8)[:, -4:]
    both = apart, (log_probs, torch.where(real, entropy, 0.0))
    weights = torch.rand(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [
        torch.autograd.grad((log_probs * weights + entropy).sum(), list(policy.parameters()))
        for log_probs, entropy in both
    ]
    return *both, *gradients


def run_again() -> torch.nn.Module:
    """A model that is run again on the way back, and keeps no cache."""
    policy = tiny_llama().train()  # it has no dropout
    policy.gradient_checkpointing_enable()
    return policy


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("make", [tiny_gpt, tiny_llama, lambda: Bigram(uniform(11, 11)), run_again])
@pytest.mark.parametrize("prompts", [PROMPTS, (PROMPTS[0] + 1, torch.ones_like(PROMPTS[1]))])
def test_a_prompt_read_once_scores_like_every_row_read_whole(make, prompts):
    """With and without padding, of models with and without a cache."""
    policy = make()
    apart, whole, gradient, gradient_of_whole = scored_twice(policy, prompts)
    exact = not hasattr(policy, "model")  # Llama's norms stay in float32
    for ours, theirs in zip(apart, whole):
        assert_close(ours, theirs, atol=1e-10 if exact else 1e-6, rtol=1e-6)
        assert torch.equal(ours == 0, torch.arange(4) >= LENGTHS[:, None])
    for ours, theirs in zip(gradient, gradient_of_whole):
        assert_close(ours, theirs, atol=1e-10 if exact else 1e-5, rtol=1e-4)


def test_each_different_prompt_is_read_once():
    policy, read = tiny_gpt(), []
    policy.register_forward_pre_hook(lambda module, args: read.append(tuple(args[0].shape)))
    ids, mask = PROMPTS
    completion_log_probs_and_entropy(policy, ids, mask, ids.new_ones(4, 3), ids.new_ones(4, 3))
    assert read == [(3, 3), (4, 2)]


def sliced(monkeypatch, positions: int, dtype=torch.float64, temperature=0.8, entropy=True):
    """Log-probs, entropies and the gradient of (4, 5, 7) logits, so many positions at a time.

    And how many numbers autograd holds on to in between, of all that it saves.
    """
    monkeypatch.setattr(logprobs, "SLICE", 7 * positions)
    logits = uniform(4, 5, 7).to(dtype).requires_grad_()
    tokens = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(0))
    weights = uniform(4, 5, seed=1)
    with saved_bytes() as kept:
        log_probs, entropies = _score(logits, tokens, temperature, entropy)
    total = ((log_probs + entropies if entropy else log_probs) * weights).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    own = logits.untyped_storage()
    copies = sum(size for place, size in kept.items() if place != own.data_ptr())
    return log_probs, entropies, gradient, copies / own.nbytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1, 0.8])
@pytest.mark.parametrize("entropy", [True, False])
def test_logits_in_slices_score_like_all_at_once(monkeypatch, dtype, temperature, entropy):
    given = dict(dtype=dtype, temperature=temperature, entropy=entropy)
    whole = sliced(monkeypatch, 1000, **given)
    for positions in (1, 3, 5, 19):
        *found, _ = sliced(monkeypatch, positions, **given)
        assert all(torch.equal(a, b) for a, b in zip(found, whole))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_copy_of_the_logits_waits_for_the_way_back(monkeypatch, dtype):
    """With a temperature, an entropy and half precision there would be several."""
    assert sliced(monkeypatch, 1000, dtype)[3] > 2
    assert sliced(monkeypatch, 3, dtype)[3] < 1.2  # the ids, which are whole numbers, in slices


def test_only_a_slice_is_copied_at_a_time(monkeypatch):
    seen = []
    monkeypatch.setattr(logprobs, "token_entropy", lambda x: seen.append(x) or token_entropy(x))
    sliced(monkeypatch, 3, entropy=False)
    assert [len(x) for x in seen] == [3] * 6 + [2] and not any(x.requires_grad for x in seen)


@pytest.mark.parametrize(("blanks", "logits"), [(300, [(3, 1), (4, 2)]), (0, [(3, 3), (4, 2)])])
def test_only_the_completions_have_logits(blanks, logits):
    """Of a model that can leave the others out.

    Of a short prompt all positions: the logits of a single one may round differently.
    """
    policy, made = tiny_llama(), []
    policy.lm_head.register_forward_hook(lambda module, given, out: made.append(out.shape[:2]))
    ids, mask = (torch.cat([x.new_zeros(4, blanks), x], dim=1) for x in PROMPTS)
    completion_log_probs_and_entropy(policy, ids, mask, ids.new_ones(4, 3), ids.new_ones(4, 3))
    assert made == logits


@pytest.mark.parametrize(
    ("prompt_mask", "completion_mask", "message"),
    [
        (torch.ones(2, 2), torch.ones(2, 3), r"prompt_mask: expected shape \(2, 4\), got \(2, 2\)"),
        (torch.zeros(2, 4), torch.ones(2, 3), "prompt_mask: expected padding on the left"),
        (torch.tensor([[1, 1, 1, 0]] * 2), torch.ones(2, 3), "expected padding on the left"),
        (torch.ones(2, 4), torch.ones(2, 1), r"completion_mask: expected shape \(2, 3\), got"),
        (torch.tensor([[1, 0, 1, 1]] * 2), torch.ones(2, 3), "prompt_mask: .* in one piece.*hole"),
        (torch.ones(2, 4), torch.tensor([[1, 0, 1]] * 2), "completion_mask: .* got a hole .*`own`"),
        (torch.tensor([[0, 1, 1, 1]] * 2), torch.tensor([[1, 0, 1]] * 2), "got a hole"),
    ],
)
def test_masks_that_would_score_something_else_are_refused(prompt_mask, completion_mask, message):
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        completion_log_probs_and_entropy(tiny_gpt(), ids, prompt_mask, ids[:, :3], completion_mask)


def test_a_temperature_of_zero_scores_nothing():
    ids, ones = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3)
    with pytest.raises(ValueError, match="temperature: expected a finite number above 0, got 0"):
        completion_log_probs_and_entropy(tiny_gpt(), ids, ones, ids, ones, temperature=0)
