"""The text: Karpathy's tinyshakespeare, downloaded once; characters as tokens; splits, batches."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minigrpo.files import atomic_path, data_folder

FILE_NAME = "tinyshakespeare.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SIZE = 1_115_394
TIMEOUT = (5, 20)  # seconds to wait for a connection, and for the next piece of data
# The 65 characters of tinyshakespeare, in order. Fixed, so that a checkpoint fits either text.
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Corpus:
    text: str
    source: str  # "MINIGRPO_DATA", "cache", "download" or "offline"
    notes: tuple[str, ...] = ()  # what did not work on the way here, a sentence each

    @property
    def is_shakespeare(self) -> bool:  # checked by its sha256
        return self.source != "offline"

    def describe(self) -> str:
        name = "tinyshakespeare" if self.is_shakespeare else "the offline corpus"
        lines = [f"{name}: {len(self.text):,} characters (from: {self.source})"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def load_corpus() -> Corpus:
    """The text, byte for byte, from the first place that has it; else the stand-in that ships."""
    cache, notes = data_folder() / "cache", []
    for source, folder in (("MINIGRPO_DATA", os.environ.get("MINIGRPO_DATA")), ("cache", cache)):
        try:
            if folder and (path := Path(folder) / FILE_NAME).exists():
                return Corpus(_verified(path.read_bytes()), source, tuple(notes))
        except (OSError, ValueError) as error:
            notes.append(f"{path} is not used: {error}")
    try:
        text = _download(URL)
        with suppress(OSError), atomic_path(cache / FILE_NAME) as unfinished:
            unfinished.write_bytes(text.encode())  # a cache is welcome, not needed
        return Corpus(text, "download", tuple(notes))
    except (OSError, ValueError) as error:
        notes.append(f"the download of {URL} failed three times: {error}")
    notes.append("so the small offline corpus that ships with the course is used instead")
    return Corpus(offline_text(), "offline", tuple(notes))


def _download(url: str, attempts: int = 3) -> str:
    import requests  # here, since the judge of losses reads this file and needs neither
    from tqdm.auto import tqdm

    try:
        with requests.get(url, stream=True, timeout=TIMEOUT) as response:
            response.raise_for_status()
            pieces = response.iter_content(SIZE // 100 + 1)
            return _verified(b"".join(tqdm(pieces, FILE_NAME, total=100, unit="%", leave=False)))
    except (OSError, ValueError):  # those of requests are among them
        if attempts == 1:
            raise
        return _download(url, attempts - 1)


def _verified(raw: bytes) -> str:
    """The text that these bytes are; ValueError unless it is the corpus."""
    if hashlib.sha256(raw).hexdigest() != SHA256:
        page = " (a web page: a proxy or a login in between?)" if b"<html" in raw.lower() else ""
        raise ValueError(f"expected the corpus, {SIZE:,} bytes, got {len(raw):,} others{page}")
    return raw.decode("ascii")


def offline_text() -> str:
    """The stand-in that ships with the course: dialogue in the same format and characters."""
    return (data_folder() / "offline_corpus.txt").read_text(encoding="ascii")


class CharTokenizer:
    """One token per character; the ids are the places in `CHARACTERS`."""

    vocab_size = len(CHARACTERS)
    id_of = {character: i for i, character in enumerate(CHARACTERS)}

    def encode(self, text: str) -> Tensor:  # (len(text),)
        return torch.tensor([self.id_of[character] for character in text], dtype=torch.long)

    def decode(self, ids: Tensor) -> str:  # (L,); ValueError for an id that is none
        places = torch.as_tensor(ids).tolist()
        if min(places, default=0) < 0:  # -1 would be the last character
            raise ValueError(f"ids: expected 0 to {self.vocab_size - 1}, got {min(places)}")
        return "".join(CHARACTERS[i] for i in places)


def split(ids: Tensor) -> tuple[Tensor, Tensor]:  # (L,) -> (0.9 L,), (0.1 L,)
    """The first part to train on, the rest to validate on; no token is in both."""
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:]


def random_batch(ids: Tensor, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of the text from random places: ids (L,) -> (batch_size, length)."""
    starts = torch.randint(len(ids) - length + 1, (batch_size, 1), generator=generator)
    return ids[starts + torch.arange(length)]


def bigram_entropy(ids: Tensor) -> float:
    """H = - sum_ab p(a, b) ln p(b | a), in nats, with the pairs counted in the text. ids (L,)."""
    vocab_size = int(ids.max()) + 1
    pairs = torch.bincount(ids[:-1] * vocab_size + ids[1:], minlength=vocab_size**2)
    joint = pairs.double().view(vocab_size, vocab_size) / (len(ids) - 1)
    return float(torch.special.entr(joint).sum() - torch.special.entr(joint.sum(dim=1)).sum())
