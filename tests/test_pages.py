"""tools/site/pages.py: a page shows each formula and figure, leads on, and loads nothing."""

import re
from html.parser import HTMLParser
from pathlib import Path

import made_up
import nbformat
import pages
import pytest
from committed import CourseError, describe
from nbformat import NotebookNode
from shell import plain


def built(tmp_path: Path, nb: NotebookNode) -> str:
    """The page of a notebook in a course of its own."""
    folder = made_up.course(tmp_path, {"01_one": made_up.notebook("1")}) / "notebooks"
    return pages.page(nb, folder / "01_one.ipynb")


def page_of(tmp_path: Path, text: str) -> str:
    """The page of a notebook that has this markdown and nothing else."""
    return built(tmp_path, made_up.notebook(text=text))


def told(page: str, tag: str = "img") -> list[dict[str, str]]:
    """The attributes of each tag of a page."""
    found, parser = [], HTMLParser()
    parser.handle_starttag = lambda name, given: name == tag and found.append(dict(given))
    parser.handle_startendtag = parser.handle_starttag
    parser.feed(page)
    return found


def page_of_cell(tmp_path: Path, *tags: str, **metadata: object) -> str:
    """The page of a notebook with one code cell, which has printed a line and drawn two figures."""
    v4 = nbformat.v4
    size = {"image/png": {"width": 7, "height": 3}}
    outputs = [v4.new_output("stream", text="what came out\n")]
    for kind, data in (("image/png", "iVBORw0KGgo="), ("image/svg+xml", "<svg>é</svg>")):
        outputs.append(v4.new_output("display_data", data={kind: data}, metadata=size))
    source, metadata = "# @title A figure\ncompare_it()", {"tags": [*tags], **metadata}
    cell = v4.new_code_cell(source, outputs=outputs, metadata=metadata)
    describe(cell)
    texts = [v4.new_markdown_cell(text) for text in ("Before.", "After")]
    return built(tmp_path, nbformat.from_dict(v4.new_notebook(cells=[texts[0], cell, texts[1]])))


def test_a_drawing_is_in_the_page_and_its_caption_is_told_from_the_text(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a loop.svg").write_text("<svg>é</svg>", "utf-8")
    drawing = "![A loop](../figures/a%20loop.svg)\n\n**Figure 1.2** Round.\n\nSee **Figure 1.2**."
    page = page_of(tmp_path, drawing)
    (image,) = told(page)
    assert image["src"] == "data:image/svg+xml;base64,PHN2Zz7DqTwvc3ZnPg=="
    assert image["alt"] == "A loop"
    assert page.count('<p class="caption">') == 1
    assert '<p class="caption"><strong>Figure 1.2</strong> Round.</p>' in page


def test_headings_keep_their_ids_and_are_listed_twice(tmp_path):
    text = "# 01 One `two`\n\n## 3 What's $k_3$?\n\n### Again\n\n## Again\n\n#### Deep"
    page = page_of(tmp_path, text)
    ids = re.findall(r'<h(\d) id="([^"]+)">', page)
    names = ["01-one-two", "3-whats-k3", "again", "again-1", "deep"]
    assert ids == [*zip("12324", names)]
    for kind in ("column", "fold"):  # one of the two is shown
        (listed,) = re.findall(rf'<nav class="contents {kind}".*?</nav>', page, re.DOTALL)
        assert re.findall('href="#([^"]+)"', listed) == names[1:4]
    assert page.index('class="contents column"') > page.index("</main>")  # Tab finds the text first
    assert page_of(tmp_path, text) == page
    assert "On this page" not in page_of(tmp_path, "# One\n\nNothing below.")


def test_the_way_on_leads_to_the_notebooks_beside_it(tmp_path):
    titles = {"01_one": "One", "02_two_&_half": "Two", "03_three": "Three"}
    course = {stem: made_up.notebook(text=f"# {title}") for stem, title in titles.items()}
    folder, found = made_up.course(tmp_path, course) / "notebooks", {}
    for stem, nb in course.items():
        page = pages.page(nb, folder / f"{stem}.ipynb")
        step = r'<a rel="(\w+)" href="([^"]+)">(.*)</a>'
        found[stem] = re.findall(step, page)
    assert found["01_one"] == [("next", "02_two_&_half.html", "02 Two_&amp;_half →")]
    places = [("prev", "01_one.html"), ("next", "03_three.html")]
    assert [step[:2] for step in found["02_two_&_half"]] == places
    assert [step[:2] for step in found["03_three"]] == [("prev", "02_two_&_half.html")]
    assert "<title>Three · minigrpo</title>" in page


def test_a_figure_has_its_own_description(tmp_path):
    said = ['"Rising"', "it's falling"]
    first, second = told(page_of_cell(tmp_path, alt=said))
    assert [first["alt"], second["alt"]] == said
    assert (first["width"], first["height"]) == ("7", "3")
    assert second["src"] == "data:image/svg+xml;base64,PHN2Zz7DqTwvc3ZnPg=="


def article(page: str) -> str:
    """The text of a page, without what stands around it."""
    return page.partition("<article>")[2].partition("</article>")[0]


def test_an_answer_and_the_code_of_a_figure_are_folded_and_a_verdict_is_left_out(tmp_path):
    page = article(page_of_cell(tmp_path, "predict"))
    inside = r"<details[^>]*><summary>Show the output</summary>(.*?)</details>"
    (folded,) = re.findall(inside, page, re.DOTALL)
    assert "what came out" in folded and folded.count("<img") == 2 and "compare_it" not in folded
    assert "compare_it" in page and "Show the output" not in page_of_cell(tmp_path)
    for tag in ("plot", "setup"):
        page = article(page_of_cell(tmp_path, tag))
        (folded,) = re.findall("<summary>A figure</summary>(.*?)</details>", page, re.DOTALL)
        assert "compare_it" in folded and not re.search("title|<img", folded)
        assert page.count("<img") == 2
    assert "<details" not in article(page_of_cell(tmp_path))
    page = article(page_of_cell(tmp_path, "verdict"))
    assert "Before." in page and "After" in page
    assert not any(text in page for text in ("compare_it", "what came out", "<img"))


def test_of_a_drawing_the_svg_is_shown_alone(tmp_path):
    v4, both = nbformat.v4, {"image/svg+xml": "<svg>é</svg>", "image/png": "iVBORw0KGgo="}
    told = {"image/png": {"alt": "A loop", "width": 560}}
    output = v4.new_output("display_data", data=both, metadata=told)
    source, tags = '# @title Drawing\ndrawing("loop")', {"tags": ["drawing"]}
    cell = v4.new_code_cell(source, outputs=[output], metadata=tags)
    page = article(built(tmp_path, nbformat.from_dict(v4.new_notebook(cells=[cell]))))
    assert re.findall("<img[^>]*>", page) == [
        '<img src="data:image/svg+xml;base64,PHN2Zz7DqTwvc3ZnPg==" alt="A loop" width="560">'
    ]
    assert "loop" not in page.replace("A loop", "") and "<pre" not in page


def test_a_stub_and_its_check_are_one_box_and_a_guess_is_a_question(tmp_path):
    stub = 'def f(x):\n    """x -> x"""\n    raise NotImplementedError'
    check = '# @title Check\nf = check("3.1", f)\nprint(f(2))'
    guesses = 'predict("07.one_word", None)\npredict("07.two", None)  # in percent'
    nb = made_up.notebook(stub, check, guesses)
    v4, told = nbformat.v4, {"text/html": "using the course's version"}
    nb.cells[2].outputs = [v4.new_output("display_data", told), v4.new_output("stream", text="4\n")]
    said = "one word: a number in place of None"
    nb.cells[3].outputs = [nbformat.v4.new_output("stream", text=said)]
    page = article(built(tmp_path, nb))
    (box,) = re.findall('<section class="exercise">(.*?)</section>', page, re.DOTALL)
    assert "<strong>Exercise 3.1.</strong>" in box and "01_one.ipynb" in box
    assert "NotImplementedError" in box and page.count("NotImplementedError") == 1
    assert "check" not in plain(page).replace("checked", "") and "print(f(2))" in plain(page)
    assert re.findall("<pre>4", page) and "course's version" not in page and "None" not in page
    assert re.findall('data-key="([^"]+)">Write down your guess: (.*)</p>', page) == [
        ("07.one_word", "<b>one word</b>"),
        ("07.two", "<b>two</b> (in percent)"),
    ]
    patient = nbformat.v4.new_code_cell('case.diagnose("...")')
    patient.outputs = [nbformat.v4.new_output("stream", text="Patient 9 waits for a diagnosis.\n")]
    page = article(built(tmp_path, nbformat.v4.new_notebook(cells=[patient])))
    assert 'href="clinic.html">in the clinic</a>' in page and "Patient 9" not in page
    nb.cells[1].source, nb.cells[3].source = "def f(x):\n    return x", 'predict("07.two", 3)'
    page = plain(built(tmp_path, nb))  # a reader's own
    assert all(text in page for text in ("return x", 'check("3.1", f)', 'predict("07.two", 3)'))
    assert nb.cells[2].source == check  # the notebook is left alone


@pytest.mark.parametrize(
    ("latex", "expected"),
    [
        (r"\pi_\theta", "<msub><mi>&#x003C0;</mi><mi>&#x003B8;</mi></msub>"),
        (r"\frac14", "<mfrac><mn>1</mn><mn>4</mn></mfrac>"),
        (r"\mathcal L", "<mi>ℒ</mi>"),
        (r"x \sim p", "<mo>&#x0223C;</mo>"),
        (r"\lvert o \rvert", 'form="postfix">&#x0007C;</mo>'),
        (r"2\log x", '<mn>2</mn><mspace width="0.167em" /><mi>log</mi><mspace width="0.167em" />'),
        (r"(\log(x))", '&#x00028;</mo><mi>log</mi><mo stretchy="false">&#x00028;</mo>'),
        ("a = -1", '&#x0003D;</mo><mo form="prefix">&#x02212;</mo>'),
        ("a - 1", "<mi>a</mi><mo>&#x02212;</mo>"),
    ],
)
def test_a_formula_becomes_mathml(latex, expected):
    assert expected in pages.mathml(latex, "inline")


@pytest.mark.parametrize("latex", [r"\nonsense{x}", "x^", r"\left(x", r"a & b"])
def test_a_formula_that_cannot_be_converted_is_named(latex):
    with pytest.raises(CourseError, match=f"formula {re.escape(repr(latex))} cannot be converted"):
        pages.mathml(f" {latex} ", "inline")


def test_text_and_code_are_left_alone(tmp_path):
    page = page_of(tmp_path, "It is `$x$`, not $x$.\n\n```\n$y$\n```\n\n$$\\frac1N$$\n")
    assert re.findall('<math[^>]* display="([a-z]+)"', page) == ["inline", "block"]
    assert "<code>$x$</code>" in page and "$y$" in page and "<mfrac>" in page


def test_a_long_cell_of_a_table_gets_room(tmp_path):
    row = "[short](https://example.org/a/b) | a sentence that would be squeezed"
    page = page_of(tmp_path, f"| a | b |\n|---|--:|\n| {row} |")
    cells = re.findall("<t[hd].*</t[hd]>", page)
    assert cells[0] == "<th>a</th>" and cells[-2].startswith("<td><a ")  # its address is no text
    assert cells[-1].startswith('<td class="long" style="text-align: right">a sentence')


def test_an_output_is_shown_as_it_is(tmp_path):
    """Its links are not touched, and a page inside it works."""
    frame = "<iframe title='x' srcdoc='&lt;script&gt;1 &lt; 2&lt;/script&gt;'></iframe>"
    output = nbformat.v4.new_output("display_data", data={"text/html": frame})
    cell = nbformat.v4.new_code_cell("show()", outputs=[output])
    page = built(tmp_path, nbformat.from_dict(nbformat.v4.new_notebook(cells=[cell])))
    assert told(page, "iframe") == [{"title": "x", "srcdoc": "<script>1 < 2</script>"}]
