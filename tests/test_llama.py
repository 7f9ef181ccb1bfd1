"""The tiny Llama: what it is, and that the ecosystem can load it. Notebook 07 makes it think."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import support
import torch
from safetensors.torch import load_file, save_file
from support import weights
from train_models import build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from minigrpo.arithmetic import (
    EOS,
    PAD,
    VOCABULARY,
    ask,
    draw_questions,
    evaluate,
    prompt_ids,
    running_totals,
    to_text,
)
from minigrpo.files import data_folder
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.rewards import answer_reward
from minigrpo.study import experiments
from minigrpo.study.experiments import WARMUP, warm_up

SHIPPED = data_folder() / "tiny_llama"
HELD_OUT = draw_questions(200, torch.Generator().manual_seed(7), held_out=True)


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    return load_policy()


def test_the_seed_decides_the_weights_and_nothing_else(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a GPU was seeded"))
    state = torch.get_rng_state()
    assert torch.equal(weights(tiny_llama(3)), weights(tiny_llama(3)))
    assert not torch.equal(weights(tiny_llama(3)), weights(tiny_llama(4)))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_tokenizer_has_the_ids_of_the_vocabulary():
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 32 and tokenizer.padding_side == "left"
    assert tokenizer.convert_ids_to_tokens(range(32)) == [*VOCABULARY]
    specials = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert specials == (PAD, 30, EOS)
    for question in HELD_OUT[:20]:
        ids = prompt_ids(question).tolist()
        assert tokenizer(to_text(ids)).input_ids == ids
        assert tokenizer.decode(ids) == to_text(ids)
    assert tokenizer(" 7\n -3\t*9 ").input_ids == [7, 13, 23]


def save(policy: LlamaForCausalLM, folder: Path) -> Path:
    policy.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def test_round_trip_to_the_bit(tmp_path):
    policy = tiny_llama(5)
    again = load_policy(save(policy, tmp_path / "policy"))
    assert torch.equal(weights(policy), weights(again))
    assert again.config.to_dict()["pad_token_id"] == PAD
    assert not again.training
    ids = torch.stack([prompt_ids(question) for question in HELD_OUT])
    assert torch.equal(policy(ids).logits, again(ids).logits)


def test_what_is_no_whole_policy_for_this_task_is_refused(tmp_path):
    with pytest.raises(OSError, match="no file named model.safetensors"):
        load_policy(tmp_path)
    hole = shutil.copytree(SHIPPED, tmp_path / "hole") / "model.safetensors"
    tensors = load_file(hole)
    del tensors["model.norm.weight"]
    save_file(tensors, hole, metadata={"format": "pt"})
    message = r"folder: expected 32 tokens and all weights, .* astray \['model.norm.weight'\]"
    with pytest.raises(ValueError, match=message):
        load_policy(hole.parent)
    save_file({**tensors, "model.norm.weight": torch.ones(64), "more": torch.ones(1)}, hole)
    with pytest.raises(ValueError, match=r"astray \['more'\]"):
        load_policy(hole.parent)
    larger = support.tiny_llama(vocab_size=33)
    with pytest.raises(ValueError, match="folder: expected 32 tokens and all weights, got 33"):
        load_policy(save(larger, tmp_path / "larger"))


def test_the_tokenizer_that_ships_is_the_one_of_the_code():
    shipped = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    assert shipped == json.loads(build_tokenizer().backend_tokenizer.to_str())


def test_the_base_can_add_and_is_impatient(base):
    scores = evaluate(base, n=256)
    assert 0.1 < scores["accuracy"] <= 0.40
    assert scores["greedy"] <= 0.40
    assert scores["thinking"] < 1.5
    # Given room to think, it goes on rightly: each next total, after the ones before it.
    questions = draw_questions(200, torch.Generator().manual_seed(1), lengths=(8,), held_out=True)
    totals = torch.tensor([running_totals(question) for question in questions])
    ids = torch.cat([torch.stack([prompt_ids(q) for q in questions]), totals], dim=1)
    with torch.no_grad():
        digits = base(ids).logits[:, -9:-1, :10].softmax(dim=-1)
    right = digits.gather(-1, totals[..., None])
    assert right.mean() > 0.97


def test_the_warm_up_learns_in_a_few_steps_and_repeats_itself(monkeypatch):
    monkeypatch.setattr(experiments, "WARMUP_ROWS", 32)
    config = replace(WARMUP, steps=8, warmup=2)
    first, again = tiny_llama(), tiny_llama()
    losses = [m.loss for m in warm_up(first, config)]
    assert losses == [m.loss for m in warm_up(again, config)]
    assert losses[-1] < losses[0] - 0.5
    other = [m.loss for m in warm_up(tiny_llama(), config, torn=0.9)]
    assert other != losses


def test_a_policy_answers_in_plain_transformers(base, tmp_path):
    """Nothing of this course is needed to use it: text in, text out."""
    save(base, tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert type(model) is LlamaForCausalLM
    prompts = [to_text(prompt_ids(question)) for question in HELD_OUT]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    written = model.generate(**given, max_new_tokens=16, do_sample=False)
    written = written[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    ours = ask(base, HELD_OUT, greedy=True)
    answers = [str(running_totals(question)[-1]) for question in HELD_OUT]
    assert [*map(answer_reward, texts, answers)] == ours.correct.tolist()
    assert 0 < sum(ours.correct) < len(HELD_OUT)
    for row, real, theirs in zip(
        ours.rollouts.completions, ours.rollouts.completion_mask, written
    ):  # token for token
        assert theirs[: real.sum()].tolist() == row[real].tolist()
