"""The text: find, verify or download tinyshakespeare; characters as tokens; splits and batches.

The corpus is Andrej Karpathy's "tinyshakespeare" (1,115,394 characters). It is not part of this
repository: it is downloaded once, checked, and kept in `data/cache/`.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import requests
import torch
from torch import Tensor
from tqdm.auto import tqdm

from minigrpo.files import atomic_path, data_folder

FILE_NAME = "tinyshakespeare.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SIZE = 1_115_394
TIMEOUT = (5, 20)
"""Seconds to wait for a connection, and for the next piece of data."""
ATTEMPTS = 3

CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The 65 characters of tinyshakespeare, in order. Fixed, so that a checkpoint fits either text."""


@dataclass(frozen=True)
class Corpus:
    """A text and where it came from.

    Attributes:
        text: the whole of it.
        source: "MINIGRPO_DATA", "cache", "download" or "offline".
        notes: what did not work on the way here, a sentence each; empty if nothing went wrong.
    """

    text: str
    source: str
    notes: tuple[str, ...] = ()

    @property
    def is_shakespeare(self) -> bool:
        """Whether this is the real tinyshakespeare (checked by sha256) and not the stand-in."""
        return self.source != "offline"

    def describe(self) -> str:
        """One or more lines to print: what this is, how long, and what went wrong before."""
        name = "tinyshakespeare" if self.is_shakespeare else "the offline corpus"
        lines = [f"{name}: {len(self.text):,} characters (from: {self.source})"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class CorpusError(RuntimeError):
    """The corpus could not be had in one of the ways tried; the message says which and why."""


def load_corpus(
    *, cache: str | Path | None = None, url: str = URL, download: bool = True
) -> Corpus:
    """The text of the course, from the first place that has it.

    Looks in the folder `$MINIGRPO_DATA`, then in the cache, then downloads (into the cache), and
    last takes the offline corpus that ships with the course. Whatever is not, byte for byte, the
    corpus is refused. The reasons for going on to the next place are in the result's `notes`.

    Args:
        cache: a folder; default `data/cache/`.
        url: where to download from.
        download: False never touches the network.

    Raises:
        CorpusError: even the offline corpus is missing or damaged.
    """
    notes: list[str] = []
    cache = data_folder() / "cache" if cache is None else Path(cache)
    given = os.environ.get("MINIGRPO_DATA", "").strip()
    places = [("MINIGRPO_DATA", Path(given) / FILE_NAME)] if given else []
    for source, path in [*places, ("cache", cache / FILE_NAME)]:
        try:
            return Corpus(_read(path), source, tuple(notes))
        except FileNotFoundError:
            if source == "MINIGRPO_DATA":
                notes.append(f"MINIGRPO_DATA: there is no {FILE_NAME} in {given}")
        except (OSError, CorpusError) as error:
            notes.append(f"{path} is not used: {error}")
    if download:
        try:
            raw = fetch(url)
        except CorpusError as error:
            notes.append(str(error))
        else:
            notes.extend(_keep(raw, cache / FILE_NAME))
            return Corpus(raw.decode("ascii"), "download", tuple(notes))
    notes.append("so the small offline corpus that ships with the course is used instead")
    return Corpus(offline_text(), "offline", tuple(notes))


def _read(path: Path) -> str:
    raw = path.read_bytes()
    _verify(raw)
    return raw.decode("ascii")


def _verify(raw: bytes) -> None:
    """Raise CorpusError unless these bytes are the corpus."""
    if hashlib.sha256(raw).hexdigest() == SHA256:
        return
    if len(raw) != SIZE:
        raise CorpusError(f"expected {SIZE:,} bytes, got {len(raw):,}")
    raise CorpusError("it has the right length but not the right content (wrong sha256)")


def fetch(url: str = URL) -> bytes:
    """Download and verify the corpus, with a progress bar; nothing is written.

    Tries up to three times; a whole answer with the wrong content is not asked for again.

    Raises:
        CorpusError: no connection, an error from the server, or not the corpus.
    """
    reason = ""
    for _ in range(ATTEMPTS):
        try:
            raw = _download(url)
        except (OSError, ValueError) as error:  # requests has its own, and lets others through
            reason = _plain_reason(error)
            continue
        try:
            _verify(raw)
        except CorpusError as error:
            page = (
                " (it is a web page: a proxy or a login in between?)"
                if b"<html" in raw[:2000].lower()
                else ""
            )
            raise CorpusError(f"the download of {url} is not the corpus: {error}{page}") from error
        return raw
    raise CorpusError(f"the download of {url} failed {ATTEMPTS} times: {reason}")


def _download(url: str) -> bytes:
    pieces = []
    with requests.get(url, stream=True, timeout=TIMEOUT) as response:
        response.raise_for_status()
        with tqdm(total=SIZE, unit="B", unit_scale=True, desc=FILE_NAME, leave=False) as bar:
            for piece in response.iter_content(chunk_size=1 << 15):
                pieces.append(piece)
                bar.update(len(piece))
                if bar.n > 4 * SIZE:
                    return b"".join(pieces)  # whatever this is, it is not the corpus
        raw = b"".join(pieces)
    # Not every version of urllib3 minds a server that hangs up early; the announced length tells.
    announced = response.headers.get("Content-Length")
    if announced and "Content-Encoding" not in response.headers and len(raw) < int(announced):
        raise requests.exceptions.ChunkedEncodingError(f"{len(raw)} of {announced} bytes")
    return raw


def _plain_reason(error: Exception) -> str:
    if isinstance(error, requests.HTTPError):
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout) or "timed out" in str(error):
        return "no answer in time"
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy refused the connection"
    if isinstance(error, requests.exceptions.SSLError):
        return "the server's certificate could not be checked"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection was cut"
    if isinstance(error, requests.ConnectionError):
        return "no connection (are you offline?)"
    return str(error)


def _keep(raw: bytes, path: Path) -> list[str]:
    """Write the corpus into the cache; a folder that cannot be written only costs a note."""
    try:
        with atomic_path(path) as unfinished:
            unfinished.write_bytes(raw)
    except OSError as error:
        return [
            f"the corpus is used from memory only: {path.parent} cannot be written "
            f"({error.strerror})"
        ]
    return []


def offline_text() -> str:
    """The stand-in that ships with the course: dialogue in the same format and characters.

    Raises:
        CorpusError: the file is missing or holds a character outside the 65.
    """
    path = data_folder() / "offline_corpus.txt"
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"the offline corpus {path} cannot be read: {error}") from error
    if strange := set(text) - set(CHARACTERS):
        raise CorpusError(f"the offline corpus {path} holds unknown {sorted(strange)}")
    return text


class CharTokenizer:
    """One token per character; the ids are the places in `CHARACTERS`."""

    def __init__(self) -> None:
        self._id_of = {character: i for i, character in enumerate(CHARACTERS)}

    @property
    def vocab_size(self) -> int:
        return len(CHARACTERS)

    def encode(self, text: str) -> Tensor:
        """Text -> (len(text),) token ids.

        Raises:
            ValueError: a character that is not among the 65; the message says which and where.
        """
        try:
            return torch.tensor([self._id_of[c] for c in text], dtype=torch.long)
        except KeyError as error:
            character = error.args[0]
            where = text.index(character)
            line, column = text.count("\n", 0, where) + 1, where - text.rfind("\n", 0, where)
            raise ValueError(
                f"text: expected only the {self.vocab_size} characters of the corpus, got "
                f"{character!r} at position {where} (line {line}, column {column})"
            ) from None

    def decode(self, ids: Tensor) -> str:
        """(L,) token ids -> text.

        Raises:
            ValueError: not one row of ids, or an id outside the vocabulary.
        """
        ids = torch.as_tensor(ids)
        if ids.dim() != 1:
            raise ValueError(f"ids: expected shape (L,), got {tuple(ids.shape)}")
        outside = (ids < 0) | (ids >= self.vocab_size)
        if outside.any():
            raise ValueError(
                f"ids: expected 0 to {self.vocab_size - 1}, got {int(ids[outside][0])} at position "
                f"{int(outside.nonzero()[0])}"
            )
        return "".join(CHARACTERS[i] for i in ids.tolist())


def split(ids: Tensor, train_share: float = 0.9) -> tuple[Tensor, Tensor]:
    """The first part to train on, the rest to validate on; no token is in both.

    ids (L,) -> (about train_share * L,), (the rest,).

    Raises:
        ValueError: a share that leaves one side empty.
    """
    cut = int(train_share * len(ids))
    if not 0 < cut < len(ids):
        raise ValueError(
            f"train_share: expected a share that leaves tokens on both sides of {len(ids)}, "
            f"got {train_share}"
        )
    return ids[:cut], ids[cut:]


def random_batch(ids: Tensor, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of the text from random places: ids (L,) -> (batch_size, length).

    Raises:
        ValueError: the text is shorter than one window.
    """
    if len(ids) < length:
        raise ValueError(f"ids: expected at least length = {length} tokens, got {len(ids)}")
    starts = torch.randint(len(ids) - length + 1, (batch_size, 1), generator=generator)
    return ids[starts + torch.arange(length)]


def unigram_entropy(ids: Tensor) -> float:
    """Entropy of the characters, in nats: the loss of one who knows only how often each occurs.

    H = - sum_a p(a) ln p(a), with p counted in the text itself (Shannon 1951). ids (L,).
    """
    p = torch.bincount(ids).double() / len(ids)
    return float(torch.special.entr(p).sum())


def bigram_entropy(ids: Tensor) -> float:
    """Entropy of a character given the one before it, in nats.

    H = - sum_ab p(a, b) ln p(b | a), with the pairs (a, b) counted in the text itself. ids (L,),
    L of 2 or more.
    """
    vocab_size = int(ids.max()) + 1
    pairs = torch.bincount(ids[:-1] * vocab_size + ids[1:], minlength=vocab_size**2)
    joint = pairs.double().view(vocab_size, vocab_size) / (len(ids) - 1)
    first = joint.sum(dim=1)
    return float(torch.special.entr(joint).sum() - torch.special.entr(first).sum())
