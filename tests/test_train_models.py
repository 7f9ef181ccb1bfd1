"""The commands that train the models in `data/`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import pytest
import text_models
import torch
import train_models
from safetensors.torch import load_file
from text_models import FAMILIES

from minigrpo import corpus
from minigrpo.arithmetic import evaluate
from minigrpo.gpt import GPTConfig, load_gpt
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.pretrain import pretrain
from minigrpo.study import experiments
from minigrpo.text.models import load_pretrained


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch):
    """One thread, batches of 4 documents, no steps to warm up in, and few questions afterwards."""
    monkeypatch.setenv("MINIGRPO_THREADS", "1")
    for module in (experiments, text_models):
        monkeypatch.setattr(module, "WARMUP", replace(module.WARMUP, warmup=0))
        monkeypatch.setattr(module, "WARMUP_ROWS", 4)
    monkeypatch.setattr(train_models, "evaluate", partial(evaluate, n=4))
    with plt.rc_context():  # the style that `setup` sets is not for later tests
        yield


def test_the_command_trains_and_writes_a_checkpoint(tmp_path, monkeypatch, capsys):
    text = corpus.Corpus(corpus.offline_text()[:2000], "cache")
    monkeypatch.setattr(corpus, "load_corpus", lambda: text)
    batches = []

    def noted(model, next_batch, config, **options):
        batches.extend(next_batch(torch.Generator().manual_seed(k)) for k in range(50))
        assert (config.seed, config.steps) == (3, 21)
        return pretrain(model, next_batch, config, **options)

    monkeypatch.setattr(train_models, "pretrain", noted)
    path = tmp_path / "model.safetensors"
    options = ["--steps", "21", "--batch-size", "2", "--length", "32", "--seed", "3"]
    train_models.main(["char_gpt", "--out", str(path), *options])
    assert load_gpt(path).config == GPTConfig(max_position_embeddings=32)
    windows = [corpus.CharTokenizer().decode(row) for batch in batches for row in batch]
    assert len(windows) == 100 and all(window in text.text[:1800] for window in windows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("char_gpt  step   21  loss ")
    assert lines[-1].startswith("validation loss ") and lines[-1].endswith(str(path))


def test_the_command_refuses_to_train_on_the_offline_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "load_corpus", lambda: corpus.Corpus("abc", "offline"))
    with pytest.raises(SystemExit, match="trained on tinyshakespeare, which could not be had"):
        train_models.main(["char_gpt", "--out", str(tmp_path / "model.safetensors")])
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_policy(tmp_path, capsys, monkeypatch):
    given, warm_up = {}, experiments.warm_up

    def noted(policy, config, **dials):
        given.update(dials, seed=config.seed, steps=config.steps)
        start = zip(policy.parameters(), tiny_llama(3).parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in start)
        return warm_up(policy, config, **dials)

    monkeypatch.setattr(experiments, "warm_up", noted)
    options = "--steps 2 --seed 3 --torn 0.2 --complete 0.5".split()
    train_models.main(["tiny_llama", "--out", str(tmp_path / "policy"), *options])
    assert "tiny_llama  step    2" in capsys.readouterr().out
    assert given == {"steps": 2, "seed": 3, "torn": 0.2, "complete": 0.5}
    load_policy(tmp_path / "policy")


def test_the_command_writes_both(tmp_path, capsys, monkeypatch):
    seeds, warm_up, small_model = [], text_models.warm_up, text_models.small_model

    def noted(policy, tokenizer, config):
        seeds.append(config.seed)
        return warm_up(policy, tokenizer, config)

    def made(family, tokenizer, seed):
        seeds.append(seed)
        return small_model(family, tokenizer, seed)

    monkeypatch.setattr(text_models, "warm_up", noted)
    monkeypatch.setattr(text_models, "small_model", made)
    train_models.main(["text_models", "--out", str(tmp_path), "--steps", "2", "--seed", "3"])
    assert seeds == [3, 3, 3, 3]
    for family in FAMILIES:
        stored = load_file(tmp_path / f"text_{family}" / "model.safetensors")
        assert {weight.dtype for weight in stored.values()} == {torch.float16}
        policy, _ = load_pretrained(tmp_path / f"text_{family}", device="cpu")
        assert policy.config.model_type == family
    assert "llama  step    2" in capsys.readouterr().out
