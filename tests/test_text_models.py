"""The two small text models: their shapes, their warm-up, and what ships."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import text_models
import torch
from text_models import FAMILIES, problem_tokenizer, small_model, warm_up
from transformers import AutoModelForCausalLM, AutoTokenizer

from minigrpo.files import data_folder
from minigrpo.sampling import sample
from minigrpo.text.models import load_pretrained
from minigrpo.text.problems import draw_rows
from minigrpo.text.prompts import stop_tokens

by_family = pytest.mark.parametrize("family", FAMILIES)
SHIPPED = {family: data_folder() / f"text_{family}" for family in FAMILIES}


@pytest.fixture(scope="module")
def tokenizer():
    return problem_tokenizer()


@pytest.mark.parametrize(("family", "size"), [("gpt2", 272_160), ("llama", 367_392)])
def test_a_small_model_has_its_size_and_its_seed(family, size, tokenizer):
    state = torch.random.get_rng_state()
    model, same, other = (small_model(family, tokenizer, seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.random.get_rng_state())
    assert sum(p.numel() for p in model.parameters()) == size
    first, second, third = (next(m.parameters()) for m in (model, same, other))
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_another_family_is_refused(tokenizer):
    with pytest.raises(ValueError, match="family: expected one of gpt2, llama, got 'bert'"):
        small_model("bert", tokenizer)


@by_family
def test_the_warm_up_learns(family, tokenizer, monkeypatch):
    monkeypatch.setattr(text_models, "WARMUP_ROWS", 16)
    model = small_model(family, tokenizer)
    config = replace(text_models.WARMUP, steps=31)
    losses = [m.loss for m in warm_up(model, tokenizer, config)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_tokenizer_that_ships_is_the_one_that_is_made(tokenizer):
    for folder in SHIPPED.values():
        shipped = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        assert shipped.get_vocab() == tokenizer.get_vocab()
        assert shipped.chat_template == tokenizer.chat_template


def test_what_ships_is_small_and_tells_nothing_about_where_it_was_made():
    files = [file for folder in SHIPPED.values() for file in folder.iterdir()]
    assert {f.suffix for f in files} <= {".json", ".jinja", ".safetensors"}
    assert sum(f.stat().st_size for f in files) <= 2_000_000
    for file in files:
        told = file.read_bytes()[: 5000 if file.suffix == ".safetensors" else None]  # its header
        for word in (b"/home", b"/tmp", b"/work", b"/root", b"Users", b"_name_or_path", b"2026-"):
            assert word not in told, file.name


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


@by_family
def test_the_readme_names_every_file_with_its_checksum(family):
    readme = (data_folder() / "README.md").read_text(encoding="utf-8")
    for file in SHIPPED[family].iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert f"| `text_{family}/{file.name}` | `{digest}` |" in readme


def test_making_a_model_leaves_the_random_numbers_of_gpus_alone(tokenizer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a GPU was seeded"))
    small_model("llama", tokenizer)
