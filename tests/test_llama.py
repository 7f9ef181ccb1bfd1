"""The tiny Llama: what it is, that the ecosystem can load it, and that GRPO makes it think."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import must_fail_on
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from minigrpo import llama
from minigrpo.arithmetic import (
    EOS,
    PAD,
    TAGS,
    VOCABULARY,
    Arithmetic,
    ask,
    draw_questions,
    evaluate,
    is_held_out,
    prompt_ids,
    read_question,
    running_totals,
    to_text,
)
from minigrpo.files import data_folder
from minigrpo.grpo import GRPOConfig, train_grpo
from minigrpo.llama import WARMUP, build_tokenizer, load_policy, save_policy, tiny_llama, warm_up
from minigrpo.rewards import answer_reward

SHIPPED = data_folder() / "tiny_llama"
HELD_OUT = draw_questions(200, torch.Generator().manual_seed(7), held_out=True)


def weights(policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    return load_policy()


# ---------------------------------------------------------------------------------------------
# model and tokenizer


def test_the_model_is_transformers_own_llama():
    policy = tiny_llama()
    assert type(policy) is LlamaForCausalLM
    assert sum(p.numel() for p in policy.parameters()) == 135_488
    assert policy.config.vocab_size == len(VOCABULARY)
    ids = (policy.config.pad_token_id, policy.config.bos_token_id, policy.config.eos_token_id)
    assert [VOCABULARY[i] for i in ids] == ["<pad>", "<s>", "</s>"]
    assert not policy.training


def test_the_seed_decides_the_weights_and_nothing_else():
    state = torch.get_rng_state()
    assert torch.equal(weights(tiny_llama(3)), weights(tiny_llama(3)))
    assert not torch.equal(weights(tiny_llama(3)), weights(tiny_llama(4)))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_tokenizer_has_the_ids_of_the_vocabulary():
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 32
    assert tokenizer.convert_ids_to_tokens(range(32)) == [*VOCABULARY]
    specials = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert specials == (PAD, 30, EOS)
    for question in HELD_OUT[:20]:
        ids = prompt_ids(question).tolist()
        assert tokenizer(to_text(ids)).input_ids == ids
        assert tokenizer.decode(ids) == to_text(ids)
    assert tokenizer(" 7\n -3\t*9 ").input_ids == [7, 13, 23]


def test_tags_are_seen_even_without_special_tokens():
    ids = [30, 25, 4, 26, 27, 4, 28, 31]
    text = build_tokenizer().decode(ids, skip_special_tokens=True)
    assert text == "<think> 4 </think> <answer> 4 </answer>"
    assert answer_reward(text, "4", given=0) == 1


def test_prompts_are_padded_on_the_left():
    batch = build_tokenizer()(["1 2 3", "4"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[1, 2, 3], [PAD, PAD, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_an_unknown_word_is_an_error():
    with pytest.raises(Exception, match="UNK"):
        build_tokenizer()("7 apples")


# ---------------------------------------------------------------------------------------------
# saved and loaded


def test_round_trip_to_the_bit(tmp_path):
    policy = tiny_llama(5)
    save_policy(policy, tmp_path / "deep" / "policy")
    again = load_policy(tmp_path / "deep" / "policy")
    assert torch.equal(weights(policy), weights(again))
    assert again.config.to_dict()["pad_token_id"] == PAD
    assert not again.training
    ids = torch.stack([prompt_ids(question) for question in HELD_OUT])
    assert torch.equal(policy(ids).logits, again(ids).logits)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["policy"]


def test_the_same_policy_gives_the_same_files(tmp_path):
    for name in ("one", "two"):
        save_policy(tiny_llama(), tmp_path / name)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names <= llama.SAVED_FILES
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_saved_policy_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = tmp_path / "policy"
    save_policy(tiny_llama(0), folder)
    save_policy(tiny_llama(1), folder)
    assert torch.equal(weights(load_policy(folder)), weights(tiny_llama(1)))

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(OSError, match="no space left"):
        save_policy(tiny_llama(2), folder)
    monkeypatch.undo()
    move, calls = os.replace, []

    def second_move_fails(source, target):
        calls.append((source, target))
        if len(calls) == 2:
            raise OSError("no such luck")
        move(source, target)

    monkeypatch.setattr(llama.os, "replace", second_move_fails)
    with pytest.raises(OSError, match="no such luck"):
        save_policy(tiny_llama(2), folder)
    assert torch.equal(weights(load_policy(folder)), weights(tiny_llama(1)))
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]


def test_nothing_but_a_policy_is_ever_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="folder: expected a new or empty .* thesis.tex"):
        save_policy(tiny_llama(), tmp_path)
    with pytest.raises(FileExistsError, match="there is a file"):
        save_policy(tiny_llama(), tmp_path / "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    save_policy(tiny_llama(), tmp_path / "empty")
    load_policy(tmp_path / "empty")


def test_what_is_no_saved_policy_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder: expected one that save_policy wrote"):
        load_policy(tmp_path)

    def spoiled(name: str) -> Path:
        return Path(shutil.copytree(SHIPPED, tmp_path / name))

    cut = spoiled("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    with pytest.raises(ValueError, match="folder: expected one that save_policy wrote, but"):
        load_policy(cut.parent)
    hole = spoiled("hole") / "model.safetensors"
    tensors = load_file(hole)
    del tensors["model.norm.weight"]
    save_file(tensors, hole, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="expected a whole policy, .* unknown: model.norm.weight"):
        load_policy(hole.parent)
    (spoiled("torn") / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="folder: expected one that save_policy wrote, but"):
        load_policy(tmp_path / "torn")
    (spoiled("larger") / "config.json").write_text('{"model_type": "llama", "vocab_size": 33}')
    with pytest.raises(ValueError, match="it has 33 tokens instead of 32"):
        load_policy(tmp_path / "larger")


# ---------------------------------------------------------------------------------------------
# the warm-up, and what ships


def test_the_shipped_checkpoint_is_small_and_tells_nothing_about_where_it_was_made():
    files = sorted(SHIPPED.iterdir())
    assert {f.name for f in files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert {f.name for f in files} <= llama.SAVED_FILES
    assert sum(f.stat().st_size for f in files) <= 1_000_000
    for file in files:
        head = file.read_bytes()[:5000]
        for word in (b"/home", b"/tmp", b"/work", b"/root", b"Users", b"_name_or_path", b"2026-"):
            assert word not in head, file.name


def test_the_readme_names_every_shipped_file_with_its_checksum():
    readme = (data_folder() / "README.md").read_text(encoding="utf-8")
    for file in SHIPPED.iterdir():
        assert f"tiny_llama/{file.name}" in readme
        assert hashlib.sha256(file.read_bytes()).hexdigest() in readme
    assert "python tools/train_models.py tiny_llama --out data/tiny_llama" in readme


def test_the_tokenizer_that_ships_is_the_one_of_the_code():
    shipped = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    assert shipped == json.loads(build_tokenizer().backend_tokenizer.to_str())


def test_the_base_can_add_and_is_impatient(base):
    scores = evaluate(base, n=1024)
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


def test_the_warm_up_learns_in_a_few_steps_and_repeats_itself():
    config = replace(WARMUP, steps=8, warmup=2)
    first, again = tiny_llama(), tiny_llama()
    losses = [m.loss for m in warm_up(first, config)]
    assert losses == [m.loss for m in warm_up(again, config)]
    assert losses[-1] < losses[0] - 0.5
    other = [m.loss for m in warm_up(tiny_llama(), config, operations="mixed")]
    assert other != losses


# ---------------------------------------------------------------------------------------------
# the summit


class Listening(Arithmetic):
    """The task, and every question that it ever asked."""

    asked: set = set()

    def reward(self, prompts, completions):
        self.asked.update(map(read_question, prompts))
        return super().reward(prompts, completions)


@pytest.fixture(scope="module")
def trained() -> LlamaForCausalLM:
    policy = load_policy()
    config = GRPOConfig(
        steps=50,
        prompts_per_step=16,
        group_size=8,
        max_new_tokens=16,
        eos_id=EOS,
        pad_id=PAD,
        lr=1e-4,
        inner_epochs=2,
        kl_weight=0.01,
        how="token_mean",
    )
    for _ in train_grpo(policy, Listening(), config):
        pass
    return policy


def test_grpo_makes_it_think(base, trained):
    before, after = evaluate(base), evaluate(trained)
    assert after["accuracy"] >= 0.95  # 0.98 and more after 100 steps
    assert after["greedy"] >= 0.99
    assert after["harder"] >= 0.90
    assert after["thinking"] >= 3 * before["thinking"]


def test_no_held_out_question_was_ever_trained_on(trained):
    asked = Listening.asked
    assert len(asked) > 500
    assert {len(question) for question in asked} == {3, 4, 5, 6}
    assert not any(map(is_held_out, asked))
    assert not asked & set(HELD_OUT)


def test_the_trained_policy_answers_in_plain_transformers(trained, tmp_path):
    """Nothing of this course is needed to use it: text in, text out."""
    save_policy(trained, tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert type(model) is LlamaForCausalLM
    prompts = [to_text(prompt_ids(question)) for question in HELD_OUT]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    written = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=16,
        do_sample=False,
    )[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    answers = [str(running_totals(question)[-1]) for question in HELD_OUT]
    assert sum(map(answer_reward, texts, answers)) >= 0.97 * len(HELD_OUT)
    # The same as here, token for token.
    ours = ask(trained, HELD_OUT, greedy=True).rollouts
    for row, real, theirs in zip(ours.completions, ours.completion_mask, written):
        assert theirs[: real.sum()].tolist() == row[real].tolist()


@must_fail_on((tiny_llama, "eos_token_id=EOS,", "eos_token_id=2,"))
def test_generate_stops_at_the_eos():
    assert tiny_llama().generation_config.eos_token_id == EOS == TAGS.eos


def test_a_link_stays_a_link_and_the_working_folder_stays(tmp_path, monkeypatch):
    save_policy(tiny_llama(1), tmp_path / "target")
    try:
        (tmp_path / "link").symlink_to(tmp_path / "target", target_is_directory=True)
    except OSError:
        pytest.skip("no links here")
    save_policy(tiny_llama(2), tmp_path / "link")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "target"]
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(weights(load_policy(tmp_path / "target")), weights(tiny_llama(2)))
    monkeypatch.chdir(tmp_path / "target")
    with pytest.raises(ValueError, match="folder: expected another than the working folder"):
        save_policy(tiny_llama(3), ".")
    assert torch.equal(weights(load_policy(tmp_path / "target")), weights(tiny_llama(2)))


@pytest.mark.parametrize(
    "change", [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"vocab_size": None}, []]
)
def test_settings_that_describe_no_llama_are_refused(tmp_path, change):
    shutil.copytree(SHIPPED, tmp_path / "policy")
    path = tmp_path / "policy" / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, **change} if change else change))
    with pytest.raises(ValueError, match="folder: expected one that save_policy wrote, but"):
        load_policy(tmp_path / "policy")


def test_making_a_model_leaves_the_random_numbers_of_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a GPU was seeded"))
    tiny_llama(3)
