"""The files that ship in data/: what they promise, and that data/README.md tells it."""

import hashlib
import re

import pytest
from test_corpus import needs_real

from minigrpo.corpus import CharTokenizer, bigram_entropy, load_corpus, offline_text, split
from minigrpo.files import data_folder
from minigrpo.gpt import GPT, load_gpt
from minigrpo.pretrain import validation_loss

FOLDER = data_folder()
CHECKPOINT = FOLDER / "char_gpt.safetensors"
PLACES = ("", "tiny_llama", "turns_llama", "turns_forger", "text_gpt2", "text_llama")
FILES = [path for place in PLACES for path in sorted((FOLDER / place).iterdir()) if path.is_file()]
SHIPPED = [
    path.relative_to(FOLDER).as_posix()
    for path in FILES
    if path.name != "README.md" and not path.name.startswith(".")
]


@pytest.fixture(scope="module")
def model() -> GPT:
    return load_gpt(CHECKPOINT)


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
def test_a_file_is_small_has_its_checksum_and_tells_nothing_about_where_it_was_made(name):
    content = (FOLDER / name).read_bytes()
    assert len(content) <= (1_000_000 if "/" in name else 2_000_000)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.search(f"`{name}`.*`{hashlib.sha256(content).hexdigest()}`", readme)
    told = content[: 5000 if name.endswith(".safetensors") else None]  # its header
    for word in (b"/home", b"/tmp", b"/work", b"/root", b"Users", b"_name_or_path", b"2026-"):
        assert word not in told
