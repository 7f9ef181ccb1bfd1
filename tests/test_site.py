"""tools/website.py: the folder of the pages is whole, leads nowhere else, and can be searched."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import course
import nbformat
import pages
import pytest
import website
from shell import slug

NOTEBOOKS = sorted((course.ROOT / "notebooks").glob("*.ipynb"))
TEXTS = {*pages.documents(course.ROOT).values()}


class Page(HTMLParser):
    """What a page holds: its ids, links, pictures and landmarks."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        told = {key: value or "" for key, value in given}
        self.tags.append((tag, told))
        self.ids += [told["id"]] if "id" in told else []

    handle_startendtag = handle_starttag

    def all(self, tag: str) -> list[dict[str, str]]:
        return [told for name, told in self.tags if name == tag]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The folder of the pages, from the notebooks as they are committed."""
    folder = tmp_path_factory.mktemp("site")
    for path in NOTEBOOKS:
        course.write_page(nbformat.read(path, as_version=4), path, folder, 61.7)
    course.write_index(NOTEBOOKS[0].parent, folder)
    return folder


@pytest.fixture(scope="module")
def site(out) -> dict[str, Page]:
    return {path.name: Page(path) for path in sorted(out.glob("*.html"))}


def index_of(out: Path) -> list[list[str]]:
    """The entries of the search."""
    text = (out / "course.js").read_text(encoding="utf-8")
    return json.loads(text[len("const INDEX = ") : text.index("];\n") + 1])


def test_every_notebook_and_text_has_its_page(site):
    names = {"index", *TEXTS, *(path.stem for path in NOTEBOOKS)}
    assert {Path(name).stem for name in site} - {"explorer"} == names  # which has its own tests
    assert {"glossary", "cheatsheet", "knobs", "results", "speed", "help", "recipes"} <= TEXTS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_shows_every_formula_and_loads_nothing(out, site, path):
    nb = nbformat.read(path, as_version=4)
    page = (out / f"{path.stem}.html").read_text(encoding="utf-8")
    assert re.findall("<script[^>]*>", page) == ['<script src="course.js" defer>']
    told = [image.get("alt", "") for image in site[f"{path.stem}.html"].all("img")]
    assert told and all(len(alt) >= 40 for alt in told)
    assert not any("No description" in alt for alt in told)  # the words of nbconvert
    assert not re.findall(r'(?:src|srcset|data)="(?!data:|course\.js)', page)
    assert not re.findall(r'<link[^>]+href="(?!data:)|@import|url\("?https?:', page)
    text = re.sub(r"<pre.*?</pre>|<code.*?</code>|<style.*?</style>", "", page, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", "", text)
    assert not re.findall(r"\$\$|\\(?:frac|sum|log|pi)\b", text)
    executed = nbformat.read(out / path.name, as_version=4)  # with the cells that the page hides
    assert [cell.source for cell in executed.cells] == [cell.source for cell in nb.cells]


def test_links_inside_the_folder_lead_somewhere(out, site):
    for name, page in site.items():
        assert len(page.ids) == len({*page.ids}), name
        for link in page.all("a"):
            file, _, anchor = link["href"].partition("#")
            if re.match(r"https?://|mailto:|data:", file):
                continue
            assert not file or file in site, f"{name} links {link['href']}"
            if anchor:
                ids = [*site[file or name].ids]
                assert unescape(anchor) in ids, f"{name} links {link['href']}"


def test_nothing_is_loaded_and_nothing_is_outside_the_folder(out, site):
    loaded = {"img": "src", "script": "src", "link": "href", "source": "src", "object": "data"}
    for name, page in site.items():
        for tag, attribute in loaded.items():
            for told in page.all(tag):
                if tag == "script" and name == "explorer.html":
                    assert attribute not in told  # its scripts are in the page
                    continue
                place = told.get(attribute, "")
                inside = place.startswith("data:") or place in {path.name for path in out.iterdir()}
                assert inside, f"{name} loads {place[:80]}"
    script = (website.WEB / "course.js").read_text(encoding="utf-8")
    assert not re.search(r"fetch|XMLHttp|import\(|https?:|innerHTML|eval", script)


def test_files_without_a_page_are_linked_where_the_course_is_published(site):
    address = pages.repository(course.ROOT)
    assert address.startswith("https://")
    links = [a["href"] for page in site.values() for a in page.all("a")]
    ours = [link for link in links if link.startswith(f"{address}/")]
    assert f"{address}/blob/main/minigrpo/clinic/smallest_tests.py" in ours
    for link in ours:
        kind, _, place = link.removeprefix(f"{address}/").partition("/main/")
        if kind not in ("blob", "tree"):
            continue
        path = course.ROOT / place.partition("#")[0]
        assert path.is_dir() if kind == "tree" else path.is_file(), link


def test_every_page_has_landmarks_and_pictures_are_told(site):
    for name, page in site.items():
        if name == "explorer.html":
            continue
        assert [told.get("id") for told in page.all("main")] == ["main"], name
        assert page.all("html")[0]["lang"] == "en" and len(page.all("h1")) == 1, name
        assert all(told.get("aria-label") for told in page.all("nav")), name
        assert all(told.get("alt") for told in page.all("img")), name
        assert ("a", {"class": "skip", "href": "#main"}) in page.tags, name


def test_the_index_says_what_each_notebook_gives(out, site):
    text = (out / "index.html").read_text(encoding="utf-8")
    cards = re.findall(r'<section class="card" id="([^"]+)">(.*?)</section>', text, re.DOTALL)
    assert [stem for stem, _ in cards] == [path.stem for path in NOTEBOOKS] == [*website.CARDS]
    for (stem, card), path in zip(cards, NOTEBOOKS):
        (image,) = re.findall(r'<img src="([^"]+)" alt="[^"]{40,}" width="\d+" height="\d+">', card)
        png = (out / image).read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) < 200_000
        assert website.CARDS[stem][0].split(",")[0] in unescape(card)
        first = nbformat.read(path, as_version=4).cells[0].source
        read, done = re.search(r"\| (\d+) \| (\d+) \| \d+ on", first).groups()
        assert f"{read} min of prose · {done} min of exercises · executed in 62 s" in card
        listed = re.findall(rf'<a href="{stem}\.html#([^"]+)"', card)
        there = website.headings((out / f"{stem}.html").read_text(encoding="utf-8"))
        assert listed == [h.id for h in there if h.level in (2, 3)] and len(listed) > 10
    parts = re.findall(r"<h2><span>(Part I+)</span> [^<]+</h2>\n<section[^>]* id=\"(\d\d)", text)
    assert parts == [("Part I", "01"), ("Part II", "04"), ("Part III", "08")]
    assert {f"{name}.html" for name in TEXTS} <= {a["href"] for a in site["index.html"].all("a")}


def test_the_search_knows_every_heading_and_every_word(out, site):
    found = index_of(out)
    places = {where for _, where, _, _ in found}
    for name in {*site} - {"index.html", "explorer.html"}:
        heads = website.headings((out / name).read_text(encoding="utf-8"))
        assert heads and {f"{name}#{h.id}" for h in heads if h.level > 1} <= places
    for _, where, _, _ in found:
        file, _, anchor = where.partition("#")
        assert file in site and (not anchor or anchor in site[file].ids), where
    glossary = (course.ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|$`]+) \| ", glossary[glossary.index("## Words") :], re.MULTILINE)
    told = {what: says for what, where, _, says in found if where.startswith("glossary.html#word")}
    assert len(words) > 80 and {word for word in words[1:]} <= {*told}
    assert told["batch"] == "The rows that are computed together."
    assert ["glossary.html#word-batch"] == [w for what, w, _, _ in found if what == "batch"]


def test_pages_are_written_the_same_again(out, tmp_path):
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    path = NOTEBOOKS[3]
    (out / f"{path.stem}.png").write_bytes(b"an old figure")
    course.write_page(nbformat.read(path, as_version=4), path, out, 61.7)
    course.write_index(NOTEBOOKS[0].parent, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


# ---------------------------------------------------------------------------------------------
# small courses


@pytest.fixture
def small(tmp_path) -> Path:
    """A course of three notebooks and a text, each with links to the others."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "help.md").write_text("# Help\n\n[two](../notebooks/02_two.ipynb#b)\n")
    v4 = nbformat.v4
    for stem, title in (("01_one", "One"), ("02_two", "Two"), ("03_three", "Three <3")):
        text = f"# {title}\n\n[two](02_two.ipynb#B) [help](../docs/help.md)\n\n## A\n\n## B"
        nb = v4.new_notebook(cells=[v4.new_markdown_cell(text, id="title")])
        nb.nbformat_minor = 5
        nbformat.write(nb, tmp_path / "notebooks" / f"{stem}.ipynb")
    return tmp_path


def built(root: Path, *stems: str) -> Path:
    """The folder of the pages of some notebooks."""
    out = root / "out"
    out.mkdir(exist_ok=True)
    for stem in stems:
        path = root / "notebooks" / f"{stem}.ipynb"
        course.write_page(nbformat.read(path, as_version=4), path, out, 1)
    course.write_index(root / "notebooks", out)
    return out


def places(out: Path, name: str) -> list[str]:
    return [a["href"] for a in Page(out / name).all("a")]


def test_a_link_leads_to_the_index_while_there_is_no_page(small):
    out = built(small, "01_one", "03_three")
    for name in ("01_one.html", "03_three.html", "help.html"):
        assert "index.html#02_two" in places(out, name)
        assert not any(place.startswith("02_two") for place in places(out, name))
    assert "02_two" in Page(out / "index.html").ids
    built(small, "02_two")
    assert "02_two.html#b" in places(out, "help.html")
    assert places(out, "01_one.html").count("02_two.html") == 2  # next, at top and bottom
    assert not any("index.html#0" in place for place in places(out, "03_three.html"))
    (out / "02_two.html").unlink()
    built(small)
    assert "index.html#02_two" in places(out, "01_one.html")


def test_what_is_gone_or_has_changed_leaves_no_page(small):
    out = built(small, "01_one", "02_two", "03_three")
    for name in ("09_gone.html", "09_gone.png", "old.html"):
        (out / name).touch()
    (small / "docs" / "help.md").unlink()
    nb = nbformat.read(small / "notebooks" / "02_two.ipynb", as_version=4)
    nb.cells[0].source += "\n\nMore."
    nbformat.write(nb, small / "notebooks" / "02_two.ipynb")
    course.remove_stale(small / "notebooks", out)
    built(small)
    names = sorted(path.name for path in out.iterdir())
    kept = ["01_one.html", "01_one.ipynb", "03_three.html", "03_three.ipynb"]
    assert names == [*kept, "course.js", "index.html"]
    assert "help.html" not in places(out, "index.html")
    assert [what for what, *_ in index_of(out)] == ["One", "A", "B", "Three <3", "A", "B"]


def test_the_explorer_is_linked_where_it_is_there(small):
    out = built(small, "01_one")
    assert "explorer.html" not in places(out, "index.html")
    (out / "explorer.html").write_text("<p>An explorer.</p>")
    course.remove_stale(small / "notebooks", out)
    website.write_index(course.choose(small / "notebooks"), out, {})
    assert "explorer.html" in places(out, "index.html")
    assert index_of(out)[-1][:2] == ["The explorer", "explorer.html"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 What's a good loss? Unigram &amp; bigram", "3-whats-a-good-loss-unigram--bigram"),
        ("3-What's-a-good-loss?-Unigram-&amp;-bigram", "3-whats-a-good-loss-unigram--bigram"),
        ("TRL's defaults over time", "trls-defaults-over-time"),
        ("trls-defaults-over-time", "trls-defaults-over-time"),
    ],
)
def test_an_anchor_of_jupyterlab_or_github_becomes_the_same(text, expected):
    assert slug(text) == expected
