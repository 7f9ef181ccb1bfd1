"""The files that ship in data/: what they promise, and that data/README.md tells it."""

from __future__ import annotations

import hashlib

import pytest
from test_corpus import needs_real

from minigrpo.corpus import CharTokenizer, bigram_entropy, load_corpus, offline_text, split
from minigrpo.files import data_folder
from minigrpo.gpt import GPT, load_gpt
from minigrpo.pretrain import validation_loss

FOLDER = data_folder()
CHECKPOINT = FOLDER / "char_gpt.safetensors"
SHIPPED = sorted(
    path.name
    for path in FOLDER.iterdir()
    if path.is_file() and path.name != "README.md" and not path.name.startswith(".")
)


@pytest.fixture(scope="module")
def model() -> GPT:
    return load_gpt(CHECKPOINT)


def test_the_checkpoint_is_small():
    assert CHECKPOINT.stat().st_size <= 2_000_000


def test_the_checkpoint_beats_the_bigrams_of_a_text_it_has_never_seen(model):
    ids = CharTokenizer().encode(offline_text())
    assert validation_loss(model, ids, 256, max_windows=64) < bigram_entropy(ids) - 0.3


@needs_real
def test_the_checkpoint_knows_its_corpus(model):
    corpus = load_corpus()
    assert corpus.is_shakespeare
    _, val = split(CharTokenizer().encode(corpus.text))
    assert validation_loss(model, val, 256, max_windows=64) < 1.60


@pytest.mark.parametrize("name", SHIPPED)
def test_the_readme_names_every_file_with_its_checksum(name):
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert name in readme
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() in readme
