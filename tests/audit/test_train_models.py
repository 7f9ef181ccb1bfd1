"""The commands that train the models in `data/`, and the two text models that ship."""

from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import pytest
import torch
import train_models
from safetensors.torch import load_file
from train_models import FAMILIES, problem_tokenizer, small_model, warm_up
from transformers import AutoModelForCausalLM, AutoTokenizer

from minigrpo import corpus
from minigrpo.arithmetic import evaluate
from minigrpo.files import data_folder
from minigrpo.gpt import GPTConfig, load_gpt
from minigrpo.llama import load_policy, tiny_llama
from minigrpo.pretrain import pretrain
from minigrpo.sampling import sample
from minigrpo.study import experiments
from minigrpo.text.models import load_pretrained
from minigrpo.text.problems import draw_rows
from minigrpo.text.prompts import stop_tokens
from minigrpo.turns import commits


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch):
    """One thread, two steps, batches of 4 documents, no warm-up, and few questions afterwards."""
    monkeypatch.setenv("MINIGRPO_THREADS", "1")
    trainings = [(train_models, name) for name in ("CHAR_TRAINING", "TEXT_WARMUP", "TURNS_WARMUP")]
    for module, name in ((experiments, "WARMUP"), *trainings):
        monkeypatch.setattr(module, name, replace(getattr(module, name), steps=2, warmup=0))
    monkeypatch.setattr(experiments, "WARMUP_ROWS", 4)
    monkeypatch.setattr(train_models, "TEXT_ROWS", 4)
    monkeypatch.setattr(train_models, "evaluate", partial(evaluate, n=4))
    with plt.rc_context():  # the style that `setup` sets is not for later tests
        yield


def test_the_command_trains_and_writes_a_checkpoint(tmp_path, monkeypatch, capsys):
    text = corpus.Corpus(corpus.offline_text()[:2000], "cache")
    monkeypatch.setattr(corpus, "load_corpus", lambda: text)
    batches = []

    def noted(model, next_batch, config, **options):
        batches.extend(next_batch(torch.Generator().manual_seed(k)) for k in range(50))
        assert config == train_models.CHAR_TRAINING
        return pretrain(model, next_batch, config, **options)

    monkeypatch.setattr(train_models, "pretrain", noted)
    path = tmp_path / "model.safetensors"
    monkeypatch.setattr(train_models, "BATCH", 2)
    monkeypatch.setattr(train_models, "LENGTH", 32)
    train_models.main(["char_gpt", "--out", str(path)])
    assert load_gpt(path).config == GPTConfig(max_position_embeddings=32)
    windows = [corpus.CharTokenizer().decode(row) for batch in batches for row in batch]
    assert len(windows) == 100 and all(window in text.text[:1800] for window in windows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("char_gpt  step    2  loss ")
    assert lines[-1].startswith("validation loss ")


def test_the_command_refuses_to_train_on_the_offline_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "load_corpus", lambda: corpus.Corpus("abc", "offline"))
    with pytest.raises(SystemExit, match="tinyshakespeare could not be had"):
        train_models.main(["char_gpt", "--out", str(tmp_path / "model.safetensors")])
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_policy(tmp_path, capsys, monkeypatch):
    warm_up = experiments.warm_up

    def noted(policy, config):
        assert config == experiments.WARMUP
        start = zip(policy.parameters(), tiny_llama(0).parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in start)
        return warm_up(policy, config)

    monkeypatch.setattr(experiments, "warm_up", noted)
    train_models.main(["tiny_llama", "--out", str(tmp_path / "policy")])
    assert "tiny_llama  step    2" in capsys.readouterr().out
    load_policy(tmp_path / "policy")


def test_the_command_writes_both(tmp_path, capsys):
    train_models.main(["text_models", "--out", str(tmp_path)])
    for family in FAMILIES:
        stored = load_file(tmp_path / f"text_{family}" / "model.safetensors")
        assert {weight.dtype for weight in stored.values()} == {torch.float16}
        policy, _ = load_pretrained(tmp_path / f"text_{family}", device="cpu")
        assert policy.config.model_type == family
    assert "llama  step    2" in capsys.readouterr().out


def test_the_command_writes_both_that_call_a_tool(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_models, "TURNS_ROWS", 4)
    monkeypatch.setattr(train_models.commits, "evaluate", partial(commits.evaluate, n=4))
    train_models.main(["turns_models", "--out", str(tmp_path)])
    assert "turns_forger  step    2" in capsys.readouterr().out
    policies = [load_policy(tmp_path / name).state_dict() for name in train_models.TURNS_FORGED]
    assert any(not torch.equal(*pair) for pair in zip(*(p.values() for p in policies)))
    for name in train_models.TURNS_FORGED:
        shipped = AutoTokenizer.from_pretrained(data_folder() / name, local_files_only=True)
        assert shipped.get_vocab() == {word: i for i, word in enumerate(commits.VOCABULARY)}


def test_documents_are_careless_and_end_in_a_commit_that_is_open():
    g, stops = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        ids = torch.tensor(train_models.careless_tests(g, stop=0.5, forged=0.0))
        said = torch.tensor([commits.RESULT, commits.GOOD, commits.BAD, commits.END_RESULT])
        e = commits.read_episode(ids, ~torch.isin(ids, said))
        assert e.open[0] <= e.answer <= e.open[1] and all(bits > 0 for bits in e.bits)
        stops += not e.calls
    assert 100 < stops < 200
    ids, mask = train_models.tests_batch(8, g, forged=1.0)
    assert commits.END_CALL not in ids and (ids == commits.RESULT).any() and mask.any(dim=1).all()


# ---------------------------------------------------------------------------------------------
# the two text models

by_family = pytest.mark.parametrize("family", FAMILIES)
SHIPPED = {family: data_folder() / f"text_{family}" for family in FAMILIES}


@pytest.fixture(scope="module")
def tokenizer():
    return problem_tokenizer()


@pytest.mark.parametrize(("family", "size"), [("gpt2", 272_160), ("llama", 367_392)])
def test_a_small_model_has_its_size_and_its_seed(family, size, tokenizer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a GPU was seeded"))
    state = torch.random.get_rng_state()
    model, same, other = (small_model(family, tokenizer, seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.random.get_rng_state())
    assert sum(p.numel() for p in model.parameters()) == size
    first, second, third = (next(m.parameters()) for m in (model, same, other))
    assert torch.equal(first, second) and not torch.equal(first, third)


@by_family
def test_the_warm_up_learns(family, tokenizer, monkeypatch):
    monkeypatch.setattr(train_models, "TEXT_ROWS", 16)
    model = small_model(family, tokenizer)
    config = replace(train_models.TEXT_WARMUP, steps=31, warmup=30)
    losses = [m.loss for m in warm_up(model, tokenizer, config)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_tokenizer_that_ships_is_the_one_that_is_made(tokenizer):
    for folder in SHIPPED.values():
        shipped = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        assert shipped.get_vocab() == tokenizer.get_vocab()
        assert shipped.chat_template == tokenizer.chat_template


@by_family
def test_they_write_the_same_in_plain_transformers(family):
    model = AutoModelForCausalLM.from_pretrained(SHIPPED[family], local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED[family], local_files_only=True)
    row = draw_rows(1, torch.Generator().manual_seed(3))[0]
    given = tokenizer(row["prompt"], return_tensors="pt")
    written = model.float().generate(**given, max_new_tokens=40, do_sample=False)
    policy, _ = load_pretrained(SHIPPED[family], device="cpu", dtype=torch.float32)
    stops = stop_tokens(tokenizer, policy)
    ours = sample(policy, given["input_ids"], max_new_tokens=40, top_k=1, eos_id=stops)
    assert written.tolist() == torch.cat([given["input_ids"], ours.completions], dim=1).tolist()
