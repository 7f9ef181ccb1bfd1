"""Texts, chats and rewards over a real tokenizer; models of three families from their folders."""

import json
import shutil
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import with_bos
from train_models import train_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from minigrpo.logprobs import token_log_probs
from minigrpo.sampling import left_pad, sample
from minigrpo.text.models import load_pretrained
from minigrpo.text.prompts import (
    TextProblems,
    answer_reward,
    decode_completion,
    encode_prompt,
    format_reward,
    number,
    stop_tokens,
    write,
)

TEXTS = ["Ann has 3 apples and buys 4 more. How many apples does Ann have?", "Ben has 12 pens."]
RIGHT = "<think>3 + 4 = 7</think><answer>7</answer>"
CHAT = [{"role": "user", "content": "How many?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 5, vocab_size=300)


def test_tags_are_single_tokens_that_survive_decoding_without_special_tokens(tokenizer):
    ids = tokenizer(RIGHT)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == RIGHT
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert len(tokenizer(tag)["input_ids"]) == 1
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_a_plain_prompt_and_a_chat(tokenizer):
    assert tokenizer.decode(encode_prompt(tokenizer, TEXTS[0])) == TEXTS[0]
    chat = [{"role": "system", "content": "Think."}, *CHAT]
    written = "<|system|>Think.<|end|>\n<|user|>How many?<|end|>\n<|assistant|>"
    assert tokenizer.decode(encode_prompt(tokenizer, chat)) == written


def test_a_chat_has_one_bos_where_the_template_writes_it(tokenizer):
    other = with_bos(tokenizer)
    assert other.decode(encode_prompt(other, "hi")) == "<|system|>hi"
    written = "<|system|><|user|>How many?<|end|>\n<|assistant|>"
    assert other.decode(encode_prompt(other, CHAT)) == written
    model = tiny("gpt2", len(other)).eval()
    r, _ = write(model, other, [CHAT, "hi"], max_new_tokens=1)
    assert (r.prompt_ids == other.convert_tokens_to_ids("<|system|>")).sum(dim=1).tolist() == [1, 1]


def test_a_completion_ends_at_its_first_stop_token(tokenizer):
    vocabulary = tokenizer.get_vocab()
    eos, end, pad = (vocabulary[t] for t in ("<|endoftext|>", "<|end|>", "<|pad|>"))
    written = tokenizer(RIGHT)["input_ids"]
    for ids in ([*written, end, pad, pad], [*written, eos, end, pad], [*written, end, *written]):
        assert decode_completion(tokenizer, torch.tensor(ids), (eos, end)) == RIGHT
    assert decode_completion(tokenizer, torch.tensor(written), (eos, end)) == RIGHT
    assert decode_completion(tokenizer, torch.tensor([end]), (eos, end)) == ""
    # What is not a stop token is text, special or not.
    assert "<|end|>" in decode_completion(tokenizer, torch.tensor([*written, end]), (eos,))


def test_stop_tokens_are_those_of_tokenizer_and_model(tokenizer):
    model = tiny("gpt2", len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    eos, end = (tokenizer.get_vocab()[t] for t in ("<|endoftext|>", "<|end|>"))
    assert stop_tokens(tokenizer, model) == (eos,)
    model.generation_config.eos_token_id = [end, eos]
    assert stop_tokens(tokenizer, model) == (eos, end)
    model.generation_config.eos_token_id = end
    assert stop_tokens(tokenizer, model) == (eos, end)
    bare = train_tokenizer(TEXTS, vocab_size=280)
    bare.eos_token = None
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="tokenizer: expected an EOS token"):
        stop_tokens(bare, model)


def test_texts_and_chats_are_continued_at_once(tokenizer):
    model = tiny("gpt2", len(tokenizer)).eval()
    prompts = [TEXTS[0], CHAT, "Ben"]
    rollouts, texts = write(model, tokenizer, prompts, max_new_tokens=6, seed=1)
    assert len(rollouts.completions) == len(texts) == 3
    assert torch.equal(rollouts.prompt_mask.sum(1), torch.tensor([
        len(encode_prompt(tokenizer, prompt)) for prompt in prompts
    ]))  # fmt: skip
    again = write(model, tokenizer, prompts, max_new_tokens=6, seed=1)[1]
    assert texts == again != write(model, tokenizer, prompts, max_new_tokens=6, seed=2)[1]
    greedy = write(model, tokenizer, prompts, max_new_tokens=1, top_k=1)[0]
    assert greedy.completions.shape == (3, 1)


def test_a_text_that_ends_with_a_token_of_its_own_is_not_filled_with_padding(tokenizer):
    model, prompts = tiny("gpt2", len(tokenizer)).eval(), ["Ann", "Ben", "How many", "Why?"]
    first = write(model, tokenizer, prompts, max_new_tokens=6)[0].completions
    ends = int(first[0, 1])  # its second token ends a row, and it is no stop token of the model
    rollouts, texts = write(model, tokenizer, prompts, max_new_tokens=6, eos_id=ends)
    assert not rollouts.completion_mask.all() and ends not in stop_tokens(tokenizer, model)
    assert texts[0] == tokenizer.decode(first[0, :2])
    assert not any(tokenizer.pad_token in text for text in texts)
    # If it is one of the model's, it is no part of the text.
    model.generation_config.eos_token_id = ends
    rollouts, texts = write(model, tokenizer, prompts, max_new_tokens=6)
    assert not rollouts.completion_mask.all() and texts[0] == tokenizer.decode(first[0, :1])


FORM = {  # what cheats there are, test_rewards.py has, for the same rule
    RIGHT: 1,
    " \n<think>\n3 + 4\n= 7\n</think>\n\n  <answer>\n 7\n</answer>\n": 1,
    "<think></think><answer>7</answer>": 1,
    "": 0,
    "<answer>7</answer>": 0,
    "<think>3 + 4 = 7</think><answer> \n </answer>": 0,
    "<think>a</think><answer>6</answer><answer>7</answer>": 0,
    "So: <think>a</think><answer>7</answer>": 0,
    "<Think>a</Think><answer>7</answer>": 0,
}


@pytest.mark.parametrize(("completion", "reward"), FORM.items(), ids=range(len(FORM)))
def test_the_format_reward(completion, reward):
    assert format_reward(prompts=["?"], completions=[completion], answer=["7"]) == [reward]
    chat = [[{"role": "assistant", "content": completion}]]
    assert format_reward(prompts=[CHAT], completions=chat, answer=["7"]) == [reward]
    # The form is half of the answer reward.
    assert answer_reward(prompts=["?"], completions=[completion], answer=["7"]) == [reward]


def test_a_prompt_that_opens_the_thought():
    for prompt in ("How many? <think>", "How many?\n<think>\n"):
        assert format_reward([prompt], ["3 + 4 = 7</think><answer>7</answer>"]) == [1]
        assert format_reward([prompt], [RIGHT]) == [0]  # opened twice
    assert format_reward(["How many?"], ["3 + 4 = 7</think><answer>7</answer>"]) == [0]
    assert format_reward([CHAT], [[]]) == [0]  # no message, no form


@pytest.mark.parametrize("completion", ["", "I don't know", "</answer>", "7"])
def test_a_worked_example_in_the_prompt_is_never_paid(completion):
    prompts = [f"Like this: {RIGHT} How many?", f"How many? {RIGHT}", f"{RIGHT}<think>"]
    for prompt in prompts:
        assert format_reward([prompt], [completion]) == [0]
        assert answer_reward([prompt], [completion], answer=["7"]) == [0]


ANSWERS = [
    ("7", "7", 1),
    (7, "7", 1),
    ("7", " 7.0 ", 1),
    ("1234", "1,234", 1),
    ("$1,234.50", "1234.5", 1),
    ("-3", "\N{MINUS SIGN}3", 1),
    ("0.5", "1/2", 1),
    ("7", "8", 0),
    ("7", "7 or 8", 0),
    ("7", "7 apples", 0),
    ("-3", "3", 0),
    ("12", "1,2", 0),
    ("7", "9" * 5000, 0),
    ("7", "7" + "0" * 5000, 0),
    ("7", "7e0", 0),
    ("Ann", " Ann ", 1),
    ("Ann Lee", "Ann\nLee", 1),
    ("Ann", "ann", 0),
    ("Ann", "Ann or Ben", 0),
]


@pytest.mark.parametrize(("right", "given_answer", "reward"), ANSWERS, ids=range(len(ANSWERS)))
def test_the_answer_reward(right, given_answer, reward):
    completion = f"<think>a</think><answer>{given_answer}</answer>"
    assert answer_reward(["?"], [completion], answer=[right]) == [reward]


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        answer_reward(["?", "?"], [RIGHT, RIGHT], answer=["7"])


@given(st.fractions(max_denominator=10**6).filter(lambda x: abs(x) < 10**12))
def test_a_number_is_read_exactly(value):
    assert number(f" {value} ") == value
    assert number(str(value).replace("-", "\N{MINUS SIGN}")) == value
    whole = value.numerator
    assert number(f"{whole:,}") == number(f"{whole}.00") == Fraction(whole)


@given(st.text(max_size=12))
def test_whatever_is_no_number_is_none_and_no_error(text):
    value = number(text)
    assert value is None or any(character.isdigit() for character in text)


def rows(n: int = 3) -> list[dict]:
    return [{"prompt": f"What is {k} + 1?", "answer": str(k + 1)} for k in range(n)]


def test_the_task_pays_with_weights_and_hands_over_the_columns(tokenizer):
    seen = {}

    def spy(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [None, 1.0]

    functions, weights = (format_reward, answer_reward, spy), (1.0, 2.0, 10.0)
    eos = tokenizer.eos_token_id
    task = TextProblems(tokenizer, rows(), functions, weights)  # which ends at the EOS
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows()[:2]]
    texts = ["<think>a</think><answer>1</answer>", "<think>a</think><answer>1</answer>"]
    written = [torch.tensor([*tokenizer(text)["input_ids"], eos]) for text in texts]
    assert task.reward(prompts, written) == [3.0, 11.0]
    assert seen["answer"] == ["1", "2"] and seen["completions"] == texts
    assert seen["prompts"] == [row["prompt"] for row in rows()[:2]]


def test_a_chat_is_handed_over_as_a_chat(tokenizer):
    def spy(prompts, completions, **_):
        assert prompts == [CHAT] and completions == [[{"role": "assistant", "content": "7"}]]
        return [1]

    task = TextProblems(tokenizer, [{"prompt": CHAT, "answer": "7"}], (spy,))
    (prompt,) = task.prompts(1, torch.Generator())
    assert task.reward([prompt], [torch.tensor(tokenizer("7")["input_ids"])]) == [1.0]


def test_every_prompt_comes_once_before_any_comes_twice(tokenizer):
    task = TextProblems(tokenizer, rows(3))
    drawn = task.prompts(6, torch.Generator().manual_seed(0))
    texts = sorted(tokenizer.decode(ids) for ids in drawn)
    assert texts == sorted(2 * [row["prompt"] for row in rows(3)])
    task = TextProblems(tokenizer, rows(9))
    one, again, other = (
        [ids.tolist() for ids in task.prompts(9, torch.Generator().manual_seed(seed))]
        for seed in (0, 0, 1)
    )
    assert one == again != other


def test_two_rows_that_look_the_same_and_are_not_are_refused(tokenizer):
    different = [{"prompt": "a", "answer": "7"}, {"prompt": "a", "answer": "8"}]
    with pytest.raises(ValueError, match="rows: two rows with the prompt 'a' differ"):
        TextProblems(tokenizer, different)
    with pytest.raises(ValueError, match="rows: expected at least one, got none"):
        TextProblems(tokenizer, [])


@pytest.mark.parametrize(
    "given",
    [
        {"reward_functions": (lambda **_: [],)},
        {"reward_functions": (lambda **_: [1, 2],)},
        {"weights": (1.0,)},
    ],
)
def test_as_many_rewards_as_completions_and_weights_as_functions(tokenizer, given):
    task = TextProblems(tokenizer, rows(1), **given)
    with pytest.raises(ValueError, match="argument 2 is"):
        task.reward(task.prompts(1, torch.Generator()), [torch.tensor([5])])


def tiny(family: str, vocab_size: int):
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 64, "initializer_range": 0.1}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **ids))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    found = {}
    for family in ("gpt2", "llama", "qwen2"):
        folder = tmp_path_factory.mktemp(family)
        tiny(family, len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found[family] = folder
    return found


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of one of them, to be broken."""
    return shutil.copytree(folders["llama"], tmp_path / "model")


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_prompts_of_different_length_are_scored_as_they_are_alone(folders, family):
    """Also on absolute positions: a left-padded prompt keeps the positions it has alone."""
    policy, tokenizer = load_pretrained(folders[family], device="cpu")
    assert not policy.training and tokenizer.padding_side == "left"
    assert policy.dtype == torch.float32 and tokenizer.chat_template is not None
    prompts = [encode_prompt(tokenizer, text) for text in TEXTS]
    ids, mask = left_pad(prompts, tokenizer.pad_token_id)
    generator = torch.Generator().manual_seed(0)
    stops = stop_tokens(tokenizer, policy)
    both = sample(policy, ids, mask, max_new_tokens=5, eos_id=stops, generator=generator)
    scored = token_log_probs(policy, both.input_ids, both.attention_mask)
    for row, prompt in enumerate(prompts):
        written = both.completions[row][both.completion_mask[row]]
        alone = token_log_probs(policy, torch.cat([prompt, written])[None])[0, -len(written) :]
        start = both.prompt_ids.shape[1] - 1
        in_batch = scored[row, start : start + len(written)]
        torch.testing.assert_close(in_batch, alone, atol=1e-5, rtol=0)
        recorded = both.log_probs[row, : len(written)]
        torch.testing.assert_close(recorded, alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["/none", "./none", "~/none-of-this-name", "~nobody/model"])
def test_a_folder_that_is_not_there(name):
    with pytest.raises(FileNotFoundError, match="name_or_path: expected a folder, found none"):
        load_pretrained(name)


def test_a_folder_without_a_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="name_or_path: expected a tokenizer in"):
        load_pretrained(folder, device="cpu")


def test_a_model_with_weights_missing(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="weights are missing: model.layers.2"):
        load_pretrained(folder, device="cpu")


def test_a_tokenizer_with_more_tokens_than_the_model(folder, tokenizer):
    bigger = train_tokenizer(TEXTS, vocab_size=300)
    bigger.add_tokens(["one", "two", "three"])
    bigger.save_pretrained(folder)
    assert len(bigger) > len(tokenizer)
    with pytest.raises(ValueError, match="tokenizer: expected ids below .* but has"):
        load_pretrained(folder, device="cpu")


def test_a_tokenizer_without_a_pad_token(folder):
    bare = train_tokenizer(TEXTS * 5, vocab_size=300)
    bare.pad_token, bare.padding_side = None, "right"
    bare.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"pad_token: expected one, such as '<\|endoftext\|>'"):
        load_pretrained(folder, device="cpu")
    with pytest.raises(ValueError, match="pad_token: expected a token of the tokenizer, got 'x y'"):
        load_pretrained(folder, device="cpu", pad_token="x y")
    given = {"pad_token": "<|endoftext|>", "dtype": torch.bfloat16}
    policy, tokenizer = load_pretrained(folder, device="cpu", **given)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id and policy.dtype == torch.bfloat16
    assert tokenizer.padding_side == "left"  # its own is another


def test_the_turn_of_the_assistant_begins_behind_what_the_user_wrote():
    chat = [{"role": "user", "content": "2+5? Begin with <think>"}]
    whole, rest = "<think>a</think> <answer>7</answer>", "a</think> <answer>7</answer>"
    assert answer_reward([chat, chat], [whole, rest], ["7", "7"]) == [1, 0]
