"""The corpus: every way it can fail to come ends in a text, a clear note, and no half file.

No test leaves this machine: a server on 127.0.0.1 misbehaves as asked, and it serves a small text
that stands in for tinyshakespeare.
"""

import gzip
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigrpo import corpus
from minigrpo.corpus import (
    CHARACTERS,
    CharTokenizer,
    Corpus,
    load_corpus,
    offline_text,
    random_batch,
    split,
)

TEXT = "First Citizen:\nSpeak, speak.\n\n" * 200
RAW = TEXT.encode("ascii")
REAL = Path(os.environ.get("MINIGRPO_DATA") or corpus.data_folder() / "cache", corpus.FILE_NAME)
needs_real = pytest.mark.skipif(not REAL.is_file(), reason=f"no {corpus.FILE_NAME} on this machine")

Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """TEXT is the corpus, and this empty folder is the cache."""
    monkeypatch.setattr(corpus, "SHA256", hashlib.sha256(RAW).hexdigest())
    monkeypatch.setattr(corpus, "SIZE", len(RAW))
    monkeypatch.setattr(corpus, "URL", "http://127.0.0.1:1/input.txt")
    shutil.copy(corpus.data_folder() / "offline_corpus.txt", tmp_path)
    monkeypatch.setattr(corpus, "data_folder", lambda: tmp_path)
    for name in ("MINIGRPO_DATA", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        answers, done = self.server.answers, self.server.requests
        self.server.requests += 1
        answers[min(done, len(answers) - 1)](self)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(cache, monkeypatch) -> Iterator[ThreadingHTTPServer]:
    """Gives its `answers` one after the other, the last one again and again."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.answers, http.requests, http.closing = [], 0, threading.Event()
    monkeypatch.setattr(corpus, "URL", f"http://127.0.0.1:{http.server_port}/input.txt")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield http
    http.closing.set()
    http.shutdown()
    http.server_close()
    thread.join()


def page(body: bytes = RAW, status: int = 200, **headers: str) -> Answer:
    """An answer with this body; headers may lie."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def hang_up(request: BaseHTTPRequestHandler) -> None:
    """No answer at all."""
    request.connection.close()


def fall_silent(body: bytes) -> Answer:
    """Announce the corpus, send this much of it, and say no more."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        if body:
            page(body, Content_Length=str(len(RAW)))(request)
        request.server.closing.wait()

    return answer


HTML = b"<!DOCTYPE html>\n<HTML><body>Please log in to the network.</body></HTML>"


GZIP = page(gzip.compress(RAW), Content_Encoding="gzip")


@pytest.mark.parametrize("answer", [page(), GZIP], ids=["plain", "compressed"])
def test_a_good_download_is_used_and_kept(cache, server, answer):
    server.answers = [answer]
    assert load_corpus() == Corpus(TEXT, "download")
    assert (cache / corpus.FILE_NAME).read_bytes() == RAW
    assert os.listdir(cache) == [corpus.FILE_NAME]
    assert load_corpus() == Corpus(TEXT, "cache")
    assert server.requests == 1


FAILURES = {
    "cut after half": (page(RAW[:3000], Content_Length="6000"), "IncompleteRead|got 3,000 others"),
    "hung up": (hang_up, "Connection aborted"),
    "no answer": (fall_silent(b""), "Read timed out"),
    "silent after half": (fall_silent(RAW[:3000]), "Read timed out"),
    "bad gateway": (page(HTML, 502), "502 Server Error: Bad Gateway"),
    "proxy login": (page(HTML, 407), "407 Client Error"),
    "a web page": (page(HTML), r"6,000 bytes, got 71 others \(a web page: a proxy or a login"),
    "wrong content": (page(RAW[::-1]), "expected the corpus, 6,000 bytes, got 6,000 others$"),
    "empty": (page(b""), "got 0 others"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_download_ends_in_the_offline_corpus_and_a_clear_note(
    cache, server, monkeypatch, failure
):
    answer, reason = FAILURES[failure]
    silent = reason == "Read timed out"  # the others have time, however busy the machine is
    monkeypatch.setattr(corpus, "TIMEOUT", (60, 0.4 if silent else 60))
    server.answers = [answer]
    result = load_corpus()
    assert (result.source, result.text) == ("offline", offline_text())
    download, last = result.notes
    assert download.startswith(f"the download of {corpus.URL} failed three times: ")
    assert re.search(reason, download)
    assert last.startswith("so the small offline corpus")
    told = f"the offline corpus: {len(result.text):,} characters (from: offline)"
    assert result.describe().splitlines() == [told, f"note: {download}", f"note: {last}"]
    assert server.requests == 3
    assert not cache.exists()


@pytest.mark.parametrize("first", [hang_up, page(b"busy", 503), page(RAW[:9], Content_Length="60")])
def test_the_second_attempt_may_succeed(server, first):
    server.answers = [first, page()]
    assert load_corpus() == Corpus(TEXT, "download")
    assert server.requests == 2


def test_a_certificate_file_that_is_gone_is_told(cache, monkeypatch):
    """As behind a company's proxy: requests raises an OSError that is none of its own."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(cache / "gone.pem"))
    monkeypatch.setattr(corpus, "URL", "https://127.0.0.1:1/input.txt")
    assert "gone.pem" in load_corpus().notes[0]


def test_a_cache_that_cannot_be_written_leaves_no_half_file(cache, server, monkeypatch):
    server.answers = [page()]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert load_corpus() == Corpus(TEXT, "download")
    assert os.listdir(cache) == []


@pytest.mark.parametrize("damaged", [RAW[:-1], RAW[::-1], b""], ids=["cut", "changed", "empty"])
def test_a_damaged_cache_is_named_and_replaced(cache, server, damaged):
    server.answers = [page()]
    path = cache / corpus.FILE_NAME
    cache.mkdir()
    path.write_bytes(damaged)
    result = load_corpus()
    assert (result.source, result.text) == ("download", TEXT)
    (note,) = result.notes
    assert note.startswith(f"{path} is not used: expected the corpus, 6,000 bytes, got ")
    assert path.read_bytes() == RAW
    assert os.listdir(cache) == [corpus.FILE_NAME]


def test_minigrpo_data_comes_first_then_the_cache_then_the_download(
    tmp_path, cache, server, monkeypatch
):
    server.answers = [page()]
    given = tmp_path / "given"
    for folder in (given, cache):
        folder.mkdir()
        (folder / corpus.FILE_NAME).write_bytes(RAW)
    monkeypatch.setenv("MINIGRPO_DATA", str(given))
    sources = [load_corpus().source]
    (given / corpus.FILE_NAME).unlink()
    sources.append(load_corpus().source)
    (cache / corpus.FILE_NAME).unlink()
    sources.append(load_corpus().source)
    assert sources == ["MINIGRPO_DATA", "cache", "download"]


@needs_real
def test_the_real_corpus_is_accepted():
    result = load_corpus()
    assert result.source in ("MINIGRPO_DATA", "cache") and not result.notes
    assert result.describe().startswith("tinyshakespeare: 1,115,394 characters ")
    assert "".join(sorted(set(result.text))) == CHARACTERS


def test_the_offline_corpus_is_long_enough_and_uses_exactly_the_65_characters():
    text = offline_text()
    assert len(text) >= 60_000
    assert "".join(sorted(set(text))) == CHARACTERS
    assert len(CHARACTERS) == 65


@needs_real
def test_no_longer_line_of_the_offline_corpus_is_shakespeares():
    real = REAL.read_text(encoding="ascii")
    lines = [line for line in offline_text().splitlines() if len(line.split()) > 5]
    assert len(lines) > 500
    assert [line for line in lines if line in real] == []


@given(st.text(alphabet=CHARACTERS))
def test_text_survives_the_way_to_ids_and_back(text):
    tokenizer = CharTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == [CHARACTERS.index(c) for c in text] and ids.dtype == torch.long
    assert tokenizer.decode(ids) == text


def test_what_is_no_character_or_id_of_the_corpus_is_refused():
    with pytest.raises(KeyError, match="#"):
        CharTokenizer().encode("a#")
    with pytest.raises(IndexError):
        CharTokenizer().decode(torch.tensor([3, 65]))
    with pytest.raises(ValueError, match="ids: expected 0 to 64, got -1"):
        CharTokenizer().decode(torch.tensor([3, -1]))


@given(st.integers(2, 300))
def test_a_split_is_complete_and_without_overlap(length):
    ids = torch.arange(length)
    train, val = split(ids)
    assert torch.equal(torch.cat([train, val]), ids)
    assert len(train) == int(0.9 * length)


def test_a_batch_is_made_of_windows_from_every_possible_start():
    batch = random_batch(torch.arange(10), 400, 4, torch.Generator().manual_seed(0))
    assert batch.shape == (400, 4)
    assert (batch.diff(dim=1) == 1).all()
    assert set(batch[:, 0].tolist()) == set(range(7))  # 6 is the last window: 6 7 8 9


def test_only_the_generator_decides_a_batch():
    before = torch.get_rng_state()
    batches = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        batches.append(random_batch(torch.arange(100), 8, 4, generator).tolist())
    assert batches[0] == batches[1] != batches[2]
    assert torch.equal(torch.get_rng_state(), before)
