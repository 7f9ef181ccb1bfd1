"""tools/site/website.py: the folder of the pages is whole, leads nowhere else, can be searched."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import course
import doors
import made_up
import nbformat
import pages
import pytest
import website

from minigrpo.notebook import interactive

COURSE = course.notebooks()
CODE = "".join(notebook.location.read_text(encoding="utf-8") for notebook in COURSE)
STEMS = [path.stem for path in Path(interactive.__file__).parent.glob("*.html")]
FRAMED = {"explorer", *(stem for stem in STEMS if f'interactive.show(\\"{stem}\\"' in CODE)}
PAGES_OF_FRAMES = {f"{stem}.html" for stem in FRAMED}  # whose scripts are in the page
TEXTS = {*pages.documents(course.ROOT).values()}
EXECUTED, STORED = COURSE[3], COURSE[9]


class Page(HTMLParser):
    """What a page holds: its ids, and its tags with their attributes."""

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
    """The folder of the pages; one of the notebooks has been executed for it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "09_gone.html").touch()
    course.begin(course.ROOT, folder)
    nb = nbformat.read(EXECUTED.location, as_version=4)
    course.write_page(nb, EXECUTED.location, folder, 61.7)
    course.write_index(course.ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def site(out) -> dict[str, Page]:
    return {path.name: Page(path) for path in sorted(out.glob("*.html"))}


def index_of(out: Path) -> list[list[str]]:
    text = (out / "course.js").read_text(encoding="utf-8")
    return json.loads(text[len("const INDEX = ") : text.index("];\n") + 1])


def test_every_notebook_and_text_has_its_page_and_nothing_else_has(site):
    stems = {"index", *FRAMED, *TEXTS, *(notebook.stem for notebook in COURSE)}
    assert {Path(name).stem for name in site} == stems
    assert {"glossary", "cheatsheet", "knobs", "results", "speed", "help", "recipes"} <= TEXTS


@pytest.mark.parametrize("notebook", COURSE, ids=lambda notebook: notebook.stem)
def test_a_page_shows_every_formula_and_tells_every_picture(out, site, notebook):
    page = (out / f"{notebook.stem}.html").read_text(encoding="utf-8")
    told = [image.get("alt", "") for image in site[f"{notebook.stem}.html"].all("img")]
    assert told and all(len(alt) >= 40 for alt in told)
    assert not any("No description" in alt for alt in told)  # the words of nbconvert
    text = re.sub(r"<pre.*?</pre>|<code.*?</code>|<style.*?</style>", "", page, flags=re.DOTALL)
    assert not re.findall(r"\$\$|\\(?:frac|sum|log|pi)\b", re.sub(r"<[^>]*>", "", text))


def test_links_inside_the_folder_lead_somewhere(site):
    for name, page in site.items():
        assert len(page.ids) == len({*page.ids}), name
        for link in page.all("a"):
            file, _, anchor = link["href"].partition("#")
            if re.match(r"https?://|mailto:|data:", file):
                continue
            assert not file or file in site, f"{name} links {link['href']}"
            ids = [*site[file or name].ids]
            assert not anchor or unescape(anchor) in ids, f"{name} links {link['href']}"


def test_a_page_loads_the_search_and_nothing_else(out, site):
    for name, page in site.items():
        text = (out / name).read_text(encoding="utf-8")
        if name not in PAGES_OF_FRAMES:
            assert re.findall("<script[^>]*>", text) == ['<script src="course.js" defer>'], name
        pictures = {image.get("src", "") for image in page.all("img")}
        outside = {src for src in pictures if not src.startswith("data:")}
        assert outside <= {path.name for path in out.glob("*.png")}, name
        loaded = r'<(?:link|object|source|iframe)[^>]+(?:href|src|data)="(?!data:)'
        assert not re.findall(rf'{loaded}|srcset=|@import|url\("?https?:', text), name
    script = (website.WEB / "course.js").read_text(encoding="utf-8")
    assert not re.search(r"fetch|XMLHttp|import\(|https?:|innerHTML|eval", script)


def test_files_without_a_page_are_linked_where_the_course_is_published(site):
    address = f"https://github.com/{doors.repository()}/"
    links = [a["href"] for page in site.values() for a in page.all("a")]
    ours = [link.removeprefix(address) for link in links if link.startswith(address)]
    assert "blob/main/minigrpo/clinic/smallest_tests.py" in ours
    for link in ours:
        kind, _, place = link.partition("/main/")
        path = course.ROOT / place.partition("#")[0]
        if kind in ("blob", "tree"):
            assert path.is_dir() if kind == "tree" else path.is_file(), link
            assert path not in pages.documents(course.ROOT) and path.suffix != ".ipynb", link


def test_every_page_has_landmarks_and_pictures_are_told(site):
    for name, page in site.items():
        if name in PAGES_OF_FRAMES:
            continue
        assert [told.get("id") for told in page.all("main")] == ["main"], name
        assert page.all("html")[0]["lang"] == "en" and len(page.all("h1")) == 1, name
        assert all(told.get("aria-label") for told in page.all("nav")), name
        assert all(told.get("alt") for told in page.all("img")), name
        assert ("a", {"class": "skip", "href": "#main"}) in page.tags, name


def test_the_index_says_what_each_notebook_gives(out, site):
    text = (out / "index.html").read_text(encoding="utf-8")
    cards = re.findall(r'<section class="card" id="([^"]+)">(.*?)</section>', text, re.DOTALL)
    assert [stem for stem, _ in cards] == [notebook.stem for notebook in COURSE]
    for (stem, card), notebook in zip(cards, COURSE):
        (image,) = re.findall(r'<img src="([^"]+)" alt="[^"]{40,}" width="\d+" height="\d+">', card)
        png = (out / image).read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) < 200_000
        assert notebook.card in unescape(card)
        read, done = (notebook.told[f"minutes of {what}"] for what in ("reading", "exercises"))
        assert f"{read} min of reading · {done} min of exercises" in card
        assert ("executed in 62 s" in card) == (notebook is EXECUTED)
        assert ("make course SCALE=1 executes it" in card) == (notebook is STORED)
        listed = re.findall(rf'<a href="{stem}\.html#([^"]+)"', card)
        there = website.headings(out / f"{stem}.html")
        assert listed == [h.id for h in there if h.level in (2, 3)]
    parts = re.findall(r"<h2><span>(Part I+)</span> [^<]+</h2>\n<section[^>]* id=\"(\d\d)", text)
    assert parts == [("Part I", "01"), ("Part II", "04"), ("Part III", "08")]
    links = {a["href"] for a in site["index.html"].all("a")}
    assert {f"{name}.html" for name in (*TEXTS, *FRAMED)} <= links


def test_the_search_knows_every_heading_and_every_word(out, site):
    found = index_of(out)
    places = {where for _, where, _, _ in found}
    for name in {*site} - {"index.html"} - PAGES_OF_FRAMES:
        heads = website.headings(out / name)
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
    assert {where for _, where, _, _ in found[-len(FRAMED) :]} == PAGES_OF_FRAMES


def test_a_course_without_frames_has_no_links_to_their_pages(tmp_path):
    course.begin(made_up.course(tmp_path, {"01_one": made_up.notebook("1")}), tmp_path / "out")
    there = made_up.files(tmp_path / "out")
    assert there == ["01_one.html", "01_one.ipynb", "course.js", "index.html"]
    links = [a["href"] for a in Page(tmp_path / "out" / "index.html").all("a")]
    assert "01_one.html" in links and not PAGES_OF_FRAMES & {*links}
    assert index_of(tmp_path / "out") == [["A title", "01_one.html", "A title", ""]]
