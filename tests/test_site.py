"""tools/site/website.py: the folder of the pages is whole, leads nowhere else, can be searched."""

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
from committed import with_predicted

from minigrpo import __version__

COURSE = course.notebooks()
FRAMED: set[str] = set()
for notebook in COURSE:  # the pages shown in a frame; a second recording has its number
    stored = re.findall(r'<iframe class=\\"(\w+)', notebook.location.read_text(encoding="utf-8"))
    FRAMED |= {f"{name}_{notebook.number}" if name in FRAMED else name for name in stored}
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
    nb = with_predicted(nbformat.read(EXECUTED.location, as_version=4), EXECUTED.location)
    course.write_page(nb, EXECUTED.location, folder, 61.7)
    course.write_index(course.ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def site(out) -> dict[str, Page]:
    return {path.name: Page(path) for path in sorted(out.glob("*.html"))}


def index_of(out: Path) -> list[tuple[str, list[list[str]]]]:
    text = (out / "course.js").read_text(encoding="utf-8")
    return json.loads(text[len("const INDEX = ") : text.index("];\n") + 1])


def test_every_notebook_and_text_has_its_page_and_nothing_else_has(site):
    stems = {"index", *FRAMED, *TEXTS, *(notebook.stem for notebook in COURSE)}
    assert {Path(name).stem for name in site} == stems
    assert {"glossary", "cheatsheet", "knobs", "results", "speed", "help", "recipes"} <= TEXTS


@pytest.mark.parametrize("notebook", COURSE, ids=lambda notebook: notebook.stem)
def test_a_page_shows_every_formula(out, notebook):
    page = (out / f"{notebook.stem}.html").read_text(encoding="utf-8")
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


def test_links_from_outside_lead_to_pages(site):
    """Those of README.md and its badges, pyproject.toml, the notebooks, the recipes."""
    address, pages, found = doors.site(), {*site}, {}
    for path in (path for path in doors.files() if "tests" not in path.parts):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(doors.ROOT).as_posix()
        found[name] = re.findall(re.escape(address) + r"([\w.-]*)", text)
        assert {*found[name]} <= {"", *pages}, name
    assert found["pyproject.toml"] == [""] and "explorer.html" in found["README.md"]
    readme = (course.ROOT / "README.md").read_text("utf-8")
    assert readme.index("[![") == readme.index("[![Read it online]")


def test_a_page_loads_the_search_and_nothing_else(out, site):
    for name, page in site.items():
        text = (out / name).read_text(encoding="utf-8")
        if name not in PAGES_OF_FRAMES:
            scripts = ["<script>", '<script src="course.js" defer>']  # the first one is the theme
            assert re.findall("<script[^>]*>", text) == scripts, name
        pictures = {image.get("src", "") for image in page.all("img")}
        outside = {src for src in pictures if not src.startswith("data:")}
        assert outside <= {path.name for path in out.glob("*.png")}, name
        loaded = r'<(?:link|object|source|iframe)[^>]+(?:href|src|data)="(?!data:)'
        assert not re.findall(rf'{loaded}|srcset=|@import|url\("?https?:', text), name
    script = (website.WEB / "course.js").read_text(encoding="utf-8")
    assert not re.search(r"fetch|XMLHttp|import\(|https?:|innerHTML|eval", script)


def sources(out: Path) -> list[str]:
    """What each page says it is made of."""
    link = r'/blob/main/([^"]+)">Source of this page'
    texts = [path.read_text("utf-8") for path in sorted(out.glob("*.html"))]
    return [source for text in texts for source in re.findall(link, text)]


def test_a_page_says_its_edition_its_source_and_where_a_mistake_is_reported(out, site):
    files = [course.ROOT / source for source in sources(out)]
    notebooks = {notebook.location for notebook in COURSE}
    texts = {*pages.documents(course.ROOT), course.ROOT / "course.toml"}
    assert len(files) == len({*files}) and {*files} == notebooks | texts
    assert (course.ROOT / ".github" / "ISSUE_TEMPLATE" / "mistake.yml").is_file()
    edition = re.escape(__version__) + r"( of 20\d\d-\d\d-\d\d)?"
    for name in {*site} - PAGES_OF_FRAMES:
        footer = (out / name).read_text("utf-8").partition("<footer>")[2]
        assert "/issues/new?template=mistake.yml" in footer, name
        assert re.search(rf">Edition {edition}<", footer), name
        colab = f'/github/{doors.repository()}/blob/main/notebooks/{Path(name).stem}.ipynb"'
        there = f'"https://colab.research.google.com{colab}' in footer
        assert there == (Path(name).stem in {n.stem for n in COURSE}), name


def test_a_link_to_a_page_has_a_preview(out, site):
    for name, page in site.items():
        metas = page.all("meta")
        told = {meta.get("property", meta.get("name")): meta.get("content") for meta in metas}
        assert told["og:url"] == f"{doors.site()}{name}", name
        image = told["og:image"].removeprefix(doors.site())
        assert (out / image).read_bytes().startswith(b"\x89PNG"), name
        assert (image == "map.png") == (name not in {f"{n.stem}.html" for n in COURSE}), name
        assert told["og:title"] and len(told["og:description"]) >= 18, name
        assert told["description"] == told["og:description"], name


def test_every_page_lists_the_course_and_marks_where_one_is(site):
    for name in {*site} - {"index.html"} - PAGES_OF_FRAMES:
        listed = [a for a in site[name].all("a") if a["href"] in {f"{n.stem}.html" for n in COURSE}]
        here = [a["href"] for a in listed if a.get("aria-current") == "page"]
        assert here == [name] * 2 * (name in {f"{n.stem}.html" for n in COURSE}), name
        assert len(listed) >= 2 * len(COURSE), name  # in the fold and in the column


@pytest.mark.parametrize("notebook", COURSE, ids=lambda notebook: notebook.stem)
def test_a_page_asks_for_nothing_that_a_page_cannot_do(out, notebook):
    text = (out / f"{notebook.stem}.html").read_text("utf-8").partition("<article>")[2]
    boxes = re.findall('<section class="exercise">.*?</section>', text, re.DOTALL)
    assert len(boxes) == notebook.exercises <= text.count("Solution (try first)")
    assert all(f"/{notebook.file}" in box and "Hint 1" in box for box in boxes)
    assert len(re.findall("NotImplementedError</span>\n</pre>", text)) == len(boxes)
    cells = nbformat.read(notebook.location, 4).cells
    closed = [cell for cell in cells if "predict" in cell.metadata.get("tags", [])]
    assert text.count("<summary>Show the output</summary>") == len(closed)
    code = "\n".join(cell.source for cell in cells)
    asked = sorted(re.findall(r'^predict\("([^"]+)"', code, re.MULTILINE))
    assert sorted(re.findall('<p class="guess" data-key="([^"]+)"', text)) == asked
    text = unescape(re.sub("<[^>]*>", "", text))
    for phrase in ("run this cell again", "the course's version", "no test yet", "waits for a"):
        assert phrase not in text
    assert not re.search(r"\bcheck\(\"|^predict\(|^progress\(|@title", text, re.MULTILINE)


def test_files_without_a_page_are_linked_where_the_course_is_published(out, site):
    address = f"https://github.com/{doors.repository()}/"
    links = [a["href"] for page in site.values() for a in page.all("a")]
    ours = [link.removeprefix(address) for link in links if link.startswith(address)]
    assert "blob/main/minigrpo/clinic/smallest_tests.py" in ours
    for link in {*ours} - {f"blob/main/{source}" for source in sources(out)}:
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
        alts = [told.get("alt", "") for told in page.all("img")]
        assert all(len(alt) >= 40 and "No description" not in alt for alt in alts), name
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


def test_the_search_knows_headings_words_and_texts(out, site):
    found = index_of(out)
    assert (out / "course.js").stat().st_size < 2e6
    assert [file for file, _ in found[-len(FRAMED) :]] == [f"{name}.html" for name in framed(out)]
    known = {file: {key: texts for key, *texts in entries} for file, entries in found}
    assert {*known} == {*site} - {"index.html"}
    for name in {*site} - {"index.html"} - PAGES_OF_FRAMES:
        assert {h.id for h in website.headings(out / name)} <= {*known[name]} <= {*site[name].ids}
    glossary = (course.ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|$`]+) \| ", glossary[glossary.index("## Words") :], re.MULTILINE)
    told = {what: texts for what, *texts in known["glossary.html"].values()}
    assert len(words) > 80 and {word for word in words[1:]} <= {*told}
    assert told["batch"] == ["The rows that are computed together."]
    below = {name: " ".join(sum(there.values(), [])) for name, there in known.items()}
    assert "GSPO takes the geometric mean" in below["05_kl_and_family.html"]
    assert "On Windows, in PowerShell:" in below["help.html"]
    assert "Divide the hits of a row" not in below["03_sequence_grpo.html"]  # in a solution


def framed(out: Path) -> list[str]:
    """The pages to hold in one's hands, in the order of the index."""
    text = (out / "index.html").read_text("utf-8").partition("To hold in your hands")[2]
    return re.findall(r'<a href="(\w+)\.html">', text.partition("</ul>")[0])


def test_a_page_in_a_frame_is_a_page_of_its_own_for_each_recording(tmp_path):
    def shown(text: str) -> nbformat.NotebookNode:
        page = f"<title>Round</title>\n<body><p>{text}</p></body>".replace("<", "&lt;")
        frame = f'<iframe class="explorer" title="x" srcdoc=\'{page}\'></iframe>'
        nb = made_up.notebook("explorer.show(steps)")
        nb.cells[1].outputs = [nbformat.v4.new_output("display_data", data={"text/html": frame})]
        return nb

    stems = {"01_one": "first", "02_two": "second", "03_three": "first"}
    root = made_up.course(tmp_path, {stem: shown(text) for stem, text in stems.items()})
    course.begin(root, tmp_path / "out")
    assert framed(tmp_path / "out") == ["explorer", "explorer_02"]
    text = (tmp_path / "out" / "explorer_02.html").read_text("utf-8")
    before, nav, after = re.split("(<nav.*?</nav>)", text.replace("\n", ""))
    before = re.sub("<meta[^>]*>", "", before)  # what a link to it shows
    assert before + after == "<title>Round</title><body><p>second</p></body>"
    assert {*re.findall('href="([^"]*)"', nav)} == {"index.html", "02_two.html"}


def test_a_course_without_frames_has_no_links_to_their_pages(tmp_path):
    course.begin(made_up.course(tmp_path, {"01_one": made_up.notebook("1")}), tmp_path / "out")
    there = made_up.files(tmp_path / "out")
    assert there == ["01_one.html", "01_one.ipynb", "course.js", "index.html"]
    links = [a["href"] for a in Page(tmp_path / "out" / "index.html").all("a")]
    assert "01_one.html" in links and not PAGES_OF_FRAMES & {*links}
    assert index_of(tmp_path / "out") == [["01_one.html", [["a-title", "A title", ""]]]]
