"""The corpus: every way it can fail to come ends in a text, a clear note, and no half file.

No test leaves this machine: a server on 127.0.0.1 misbehaves as asked, and it serves a small text
that stands in for tinyshakespeare.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigrpo import corpus
from minigrpo.corpus import (
    CHARACTERS,
    CharTokenizer,
    Corpus,
    CorpusError,
    bigram_entropy,
    load_corpus,
    offline_text,
    random_batch,
    split,
    unigram_entropy,
)

TEXT = "First Citizen:\nSpeak, speak.\n\n" * 200
RAW = TEXT.encode("ascii")
REAL = Path(os.environ.get("MINIGRPO_DATA", "")) / corpus.FILE_NAME
needs_real = pytest.mark.skipif(
    not os.environ.get("MINIGRPO_DATA") or not REAL.is_file(),
    reason="MINIGRPO_DATA names no folder with tinyshakespeare.txt",
)

Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(autouse=True)
def small_corpus_on_this_machine(monkeypatch):
    """TEXT is the corpus, and this machine is all there is."""
    monkeypatch.setattr(corpus, "SHA256", hashlib.sha256(RAW).hexdigest())
    monkeypatch.setattr(corpus, "SIZE", len(RAW))
    monkeypatch.delenv("MINIGRPO_DATA", raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    send = requests.adapters.HTTPAdapter.send

    def send_here(self, request, **settings):
        assert urlsplit(request.url).hostname == "127.0.0.1", f"a test asked for {request.url}"
        return send(self, request, **settings)

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send_here)


class Server:
    """Gives its answers one after the other, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests = 0
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/input.txt"

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        answer = self.answers[min(self.requests, len(self.answers) - 1)]
        self.requests += 1
        answer(request)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.handle(self)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.closing = state.closing
    state.port = http.server_port
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    state.closing.set()
    http.shutdown()
    http.server_close()
    thread.join(timeout=5)


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
        request.server.closing.wait(5)

    return answer


HTML = b"<!DOCTYPE html>\n<HTML><body>Please log in to the network.</body></HTML>"


# ---------------------------------------------------------------------------------------------
# download


@pytest.mark.parametrize(
    "answer",
    [page(), page(gzip.compress(RAW), Content_Encoding="gzip")],
    ids=["plain", "compressed"],
)
def test_a_good_download_is_used_and_kept(tmp_path, server, answer):
    server.answers = [answer]
    assert load_corpus(cache=tmp_path, url=server.url) == Corpus(TEXT, "download")
    assert (tmp_path / corpus.FILE_NAME).read_bytes() == RAW
    assert os.listdir(tmp_path) == [corpus.FILE_NAME]
    assert load_corpus(cache=tmp_path, url=server.url) == Corpus(TEXT, "cache")
    assert server.requests == 1


FAILURES = {
    "cut after half": (page(RAW[:3000], Content_Length="6000"), 3, "connection was cut"),
    "hung up": (hang_up, 3, r"no connection \(are you offline\?\)"),
    "no answer": (fall_silent(b""), 3, "no answer in time"),
    "silent after half": (fall_silent(RAW[:3000]), 3, "no answer in time"),
    "not found": (page(b"gone", 404), 3, "the server answered 404 Not Found"),
    "bad gateway": (page(HTML, 502), 3, "the server answered 502 Bad Gateway"),
    "proxy login": (page(HTML, 407), 3, "the server answered 407"),
    "a web page": (page(HTML), 1, r"expected 6,000 bytes, got 71 \(it is a web page: a proxy"),
    "wrong content": (page(RAW[::-1]), 1, r"the right length but not .* \(wrong sha256\)"),
    "too long": (page(RAW + b"\n"), 1, "expected 6,000 bytes, got 6,001"),
    "far too long": (page(RAW * 40), 1, "is not the corpus: expected 6,000 bytes, got "),
    "empty": (page(b""), 1, "expected 6,000 bytes, got 0"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_download_ends_in_the_offline_corpus_and_a_clear_note(
    tmp_path, server, monkeypatch, failure
):
    answer, attempts, reason = FAILURES[failure]
    if reason == "no answer in time":
        monkeypatch.setattr(corpus, "TIMEOUT", (5, 0.2))
    server.answers = [answer]
    result = load_corpus(cache=tmp_path, url=server.url)
    assert (result.source, result.text) == ("offline", offline_text())
    assert len(result.notes) == 2
    assert result.notes[0].startswith(f"the download of {server.url} ")
    assert re.search(reason, result.notes[0])
    assert result.notes[1].startswith("so the small offline corpus")
    assert server.requests == attempts
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (requests.ConnectionError("Name or service not known"), r"no connection \(are you offl"),
        (requests.exceptions.ProxyError("407"), "the proxy refused the connection"),
        (requests.exceptions.SSLError("self-signed"), "certificate could not be checked"),
        (requests.ConnectTimeout(), "no answer in time"),
    ],
    ids=["offline", "proxy", "certificate", "timeout"],
)
def test_without_a_way_out_the_offline_corpus_is_used(tmp_path, monkeypatch, error, reason):
    def no_network(*_, **__):
        raise error

    monkeypatch.setattr(requests, "get", no_network)
    result = load_corpus(cache=tmp_path, url="http://127.0.0.1:1/input.txt")
    assert (result.source, result.text) == ("offline", offline_text())
    assert re.search(f"failed 3 times: .*{reason}", result.notes[0])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("first", [hang_up, page(b"busy", 503), page(RAW[:9], Content_Length="60")])
def test_the_second_attempt_may_succeed(tmp_path, server, first):
    server.answers = [first, page()]
    assert load_corpus(cache=tmp_path, url=server.url) == Corpus(TEXT, "download")
    assert server.requests == 2


def test_a_certificate_file_that_is_gone_is_told(tmp_path, monkeypatch):
    """As behind a company's proxy: requests raises an OSError that is none of its own."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "gone.pem"))
    result = load_corpus(cache=tmp_path, url="https://127.0.0.1:1/input.txt")
    assert (result.source, result.text) == ("offline", offline_text())
    assert "gone.pem" in result.notes[0]


def test_a_length_that_is_no_number_is_told(tmp_path, server):
    server.answers = [page(Content_Length="many")] * 3
    assert load_corpus(cache=tmp_path, url=server.url).source in ("download", "offline")


def test_an_address_that_is_none_is_named(tmp_path):
    result = load_corpus(cache=tmp_path, url="input.txt")
    assert "Invalid URL 'input.txt'" in result.notes[0]


def test_download_false_asks_nobody(tmp_path, server):
    server.answers = [page()]
    assert load_corpus(cache=tmp_path, url=server.url, download=False).source == "offline"
    assert server.requests == 0


# ---------------------------------------------------------------------------------------------
# the cache


def test_a_cache_that_cannot_be_a_folder_costs_only_a_note(tmp_path, server):
    server.answers = [page()]
    (tmp_path / "file").write_text("not a folder")
    result = load_corpus(cache=tmp_path / "file" / "cache", url=server.url)
    assert (result.source, result.text) == ("download", TEXT)
    assert re.search("used from memory only: .* cannot be written", result.notes[-1])
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_no_half_file(tmp_path, server, monkeypatch):
    server.answers = [page()]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result = load_corpus(cache=tmp_path, url=server.url)
    assert (result.source, result.text) == ("download", TEXT)
    (note,) = result.notes
    assert note.endswith("cannot be written (No space left on device)")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damaged", [RAW[:-1], RAW[::-1], b""], ids=["cut", "changed", "empty"])
def test_a_damaged_cache_is_named_and_replaced(tmp_path, server, damaged):
    server.answers = [page()]
    path = tmp_path / corpus.FILE_NAME
    path.write_bytes(damaged)
    result = load_corpus(cache=tmp_path, url=server.url)
    assert (result.source, result.text) == ("download", TEXT)
    (note,) = result.notes
    assert note.startswith(f"{path} is not used: ")
    assert path.read_bytes() == RAW
    assert os.listdir(tmp_path) == [corpus.FILE_NAME]


# ---------------------------------------------------------------------------------------------
# the order of places


def test_minigrpo_data_comes_first_then_the_cache_then_the_download(tmp_path, server, monkeypatch):
    server.answers = [page()]
    given, cache = tmp_path / "given", tmp_path / "cache"
    for folder in (given, cache):
        folder.mkdir()
        (folder / corpus.FILE_NAME).write_bytes(RAW)
    monkeypatch.setenv("MINIGRPO_DATA", str(given))
    sources = [load_corpus(cache=cache, url=server.url).source]
    (given / corpus.FILE_NAME).unlink()
    sources.append(load_corpus(cache=cache, url=server.url).source)
    (cache / corpus.FILE_NAME).unlink()
    sources.append(load_corpus(cache=cache, url=server.url).source)
    assert sources == ["MINIGRPO_DATA", "cache", "download"]


def test_minigrpo_data_without_the_file_is_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGRPO_DATA", str(tmp_path))
    result = load_corpus(cache=tmp_path, download=False)
    assert result.source == "offline"
    assert result.notes[0] == f"MINIGRPO_DATA: there is no {corpus.FILE_NAME} in {tmp_path}"


def test_minigrpo_data_with_another_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGRPO_DATA", str(tmp_path))
    (tmp_path / corpus.FILE_NAME).write_bytes(b"Once upon a time")
    result = load_corpus(cache=tmp_path / "cache", download=False)
    assert result.source == "offline"
    assert result.notes[0].endswith("is not used: expected 6,000 bytes, got 16")


def test_describe_says_what_is_used_and_what_went_wrong():
    assert Corpus(TEXT, "cache").describe() == "tinyshakespeare: 6,000 characters (from: cache)"
    fallen_back = Corpus("abc", "offline", ("no connection", "so the offline corpus is used"))
    assert fallen_back.describe().splitlines() == [
        "the offline corpus: 3 characters (from: offline)",
        "note: no connection",
        "note: so the offline corpus is used",
    ]


@pytest.mark.parametrize("content", [None, b"caf\xc3\xa9", b"a # b"], ids=["none", "bytes", "sign"])
def test_without_even_the_offline_corpus_the_error_names_the_file(tmp_path, monkeypatch, content):
    monkeypatch.setattr(corpus, "data_folder", lambda: tmp_path)
    if content is not None:
        (tmp_path / "offline_corpus.txt").write_bytes(content)
    with pytest.raises(CorpusError, match=r"the offline corpus \S+offline_corpus.txt .*"):
        load_corpus(download=False)


@needs_real
def test_the_real_corpus_is_accepted(monkeypatch):
    monkeypatch.undo()
    result = load_corpus(download=False)
    assert result.describe() == "tinyshakespeare: 1,115,394 characters (from: MINIGRPO_DATA)"
    assert "".join(sorted(set(result.text))) == CHARACTERS
    assert abs(unigram_entropy(CharTokenizer().encode(result.text)) - 3.3128) < 0.0005


# ---------------------------------------------------------------------------------------------
# the offline corpus


def test_the_offline_corpus_is_long_enough_and_uses_exactly_the_65_characters():
    text = offline_text()
    assert len(text) >= 60_000
    assert "".join(sorted(set(text))) == CHARACTERS
    assert len(CHARACTERS) == 65


def test_the_offline_corpus_is_a_play():
    speeches = offline_text().strip().split("\n\n")
    matches = [re.match(r"([A-Z][A-Za-z' ]+):\n\S", speech) for speech in speeches]
    assert all(matches)
    assert len({match[1] for match in matches}) >= 20


def test_the_offline_corpus_is_about_as_hard_as_the_real_one():
    assert 2.9 < unigram_entropy(CharTokenizer().encode(offline_text())) < 3.5


@needs_real
def test_no_longer_line_of_the_offline_corpus_is_shakespeares():
    real = REAL.read_text(encoding="ascii")
    lines = [line for line in offline_text().splitlines() if len(line.split()) > 5]
    assert len(lines) > 500
    assert [line for line in lines if line in real] == []


# ---------------------------------------------------------------------------------------------
# characters and ids


@given(st.text(alphabet=CHARACTERS))
def test_text_survives_the_way_to_ids_and_back(text):
    tokenizer = CharTokenizer()
    ids = tokenizer.encode(text)
    assert ids.shape == (len(text),) and ids.dtype == torch.long
    assert tokenizer.decode(ids) == text


def test_ids_are_places_among_the_65_characters():
    assert CharTokenizer().vocab_size == 65
    assert CharTokenizer().encode("\n Az").tolist() == [0, 1, 13, 64]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#", r"got '#' at position 0 \(line 1, column 1\)"),
        ("To be,\nor n0t\nto b0", r"got '0' at position 11 \(line 2, column 5\)"),
        ("\n\n\té", r"got '\\t' at position 2 \(line 3, column 1\)"),
    ],
    ids=["alone", "later", "first of two"],
)
def test_an_unknown_character_is_named_with_its_place(text, message):
    with pytest.raises(ValueError, match=f"text: expected only the 65 characters .*, {message}"):
        CharTokenizer().encode(text)


@pytest.mark.parametrize(
    ("ids", "got"), [([3, 65], "65 at position 1"), ([-1], "-1 at position 0")]
)
def test_an_id_outside_the_vocabulary_is_named_with_its_place(ids, got):
    with pytest.raises(ValueError, match=f"ids: expected 0 to 64, got {got}"):
        CharTokenizer().decode(torch.tensor(ids))


def test_decode_takes_one_row():
    with pytest.raises(ValueError, match=r"ids: expected shape \(L,\), got \(1, 2\)"):
        CharTokenizer().decode(torch.tensor([[1, 2]]))


# ---------------------------------------------------------------------------------------------
# splits and batches


@given(st.integers(2, 300), st.floats(0.01, 0.99))
def test_a_split_is_complete_and_without_overlap(length, share):
    ids = torch.arange(length)
    if int(share * length) == 0:
        return
    train, val = split(ids, share)
    assert torch.equal(torch.cat([train, val]), ids)
    assert len(train) == int(share * length)


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5, 0.05])
def test_a_split_that_leaves_one_side_empty_is_refused(share):
    message = f"train_share: expected a share that leaves tokens on both sides of 10, got {share}"
    with pytest.raises(ValueError, match=message):
        split(torch.arange(10), share)


def test_a_batch_is_made_of_windows_from_every_possible_start():
    batch = random_batch(torch.arange(10), 400, 4, torch.Generator().manual_seed(0))
    assert batch.shape == (400, 4)
    assert (batch.diff(dim=1) == 1).all()
    assert set(batch[:, 0].tolist()) == set(range(7))  # 6 is the last window: 6 7 8 9


def test_a_text_of_one_window_gives_that_window():
    assert random_batch(torch.arange(4), 1, 4, torch.Generator()).tolist() == [[0, 1, 2, 3]]


def test_only_the_generator_decides_a_batch():
    before = torch.get_rng_state()
    batches = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        batches.append(random_batch(torch.arange(100), 8, 4, generator).tolist())
    assert batches[0] == batches[1] != batches[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="ids: expected at least length = 5 tokens, got 4"):
        random_batch(torch.arange(4), 1, 5, torch.Generator())


# ---------------------------------------------------------------------------------------------
# entropies


def entropy(*counts: int) -> float:
    """Of a distribution given by how often each outcome was counted."""
    return -sum(n / sum(counts) * math.log(n / sum(counts)) for n in counts)


@pytest.mark.parametrize(
    ("ids", "unigram", "bigram"),
    [
        ([0, 1] * 50 + [0], entropy(51, 50), 0.0),
        ([7] * 10, 0.0, 0.0),
        # 0 is followed twice by 0 and twice by 1, and 1 always by 0: 4 of 6 pairs are open.
        ([0, 0, 0, 1, 0, 1, 0], entropy(5, 2), 4 / 6 * math.log(2)),
    ],
    ids=["alternating", "constant", "mixed"],
)
def test_entropies_are_those_computed_by_hand(ids, unigram, bigram):
    assert unigram_entropy(torch.tensor(ids)) == pytest.approx(unigram, abs=1e-12)
    assert bigram_entropy(torch.tensor(ids)) == pytest.approx(bigram, abs=1e-12)
