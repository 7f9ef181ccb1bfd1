"""The clinic in the browser, but for what patients show and are told: that's in test_measure.py."""

# ruff: noqa: F811 (a fixture that is imported, and then an argument)
import base64
import json
import re
import zlib
from itertools import product

import pytest
import store
from clinic_page import MEASUREMENTS, METRICS, STORE, arrival, names, nights, numbered
from test_browser import browser, is_readable, opened  # noqa: F401

from minigrpo import clinic
from minigrpo.notebook import interactive, progress

RUNS = store.load("clinic.json")["runs"]
PAGE = interactive.page("clinic", RUNS[0])
DATA = json.loads(zlib.decompress(base64.b64decode(RUNS[0]["sealed"])))
HAS, NIGHT = [one.name for one in numbered()], sorted(nights.stored())
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-\d+)?")


def alike(*pages: object) -> bool:
    """Whether the two are the same, but for the last digits of a number."""
    texts = ["".join(json.dumps(page).split()) for page in pages]
    one, other = ([*map(float, NUMBER.findall(text))] for text in texts)
    same = len({NUMBER.sub("", text) for text in texts}) == 1
    return same and one == pytest.approx(other, rel=2e-3, abs=2e-4)


def test_what_is_stored_is_of_today():
    assert STORE.stored() == RUNS and len(PAGE) < 120_000
    assert DATA["panels"] == {name: title for name, (title, _) in METRICS.items()}
    assert DATA["diagnoses"] == [*names()] and [one["has"] for one in DATA["patients"]] == HAS
    assert [*map(arrival, NIGHT)] == DATA["arrivals"]
    for seed, order in enumerate(DATA["orders"]):
        assert [NIGHT[run] for run in order] == [clinic.night(p, seed)._name for p in range(14)]


def begin(opened, tmp_path, **context) -> object:
    (tmp_path / "clinic.html").write_text(PAGE, encoding="utf-8")
    page = opened(tmp_path / "clinic.html", **context)
    page.wait_for_selector("#room h2")
    return page


@pytest.mark.browser
def test_nothing_gives_a_diagnosis_away_before_it_is_made(opened, tmp_path):
    page, source = begin(opened, tmp_path), PAGE.lower()
    assert not [name for name in names() if name != "healthy" and name.lower() in source]
    seen = r"""n => { document.querySelector(`[data-key=who${n}]`).click();
        return document.body.innerHTML.replace(/<(select|script)[^]*?<\/\1>/g, ""); }"""
    day = [(n, [p["has"]], p["answers"][p["has"]]) for n, p in enumerate(DATA["patients"], 1)]
    came = [DATA["arrivals"][run] for run in DATA["orders"][0]]
    night = [(place, one["has"], one["told"]) for place, one in enumerate(came)]
    for shift, rooms in (("day", day), ("night", night)):
        page.click(f"[data-shift={shift}]")
        for n, has, told in rooms:
            shown, secrets = page.evaluate(seen, n).lower(), {*has, *told.split("\n")} - {"healthy"}
            assert f" {n}" in shown and not [text for text in secrets if text.lower() in shown]


def press(page: object, key: str, *keys: str) -> None:
    """Go there by Tab alone, and press or type these."""
    here, tabs = "document.activeElement.dataset.key", 0
    while page.evaluate(here) != key:
        page.keyboard.press("Tab")
        assert (tabs := tabs + 1) < 40, key
    for one in keys:
        page.keyboard.press(one) if one[0].isupper() else page.keyboard.type(one)


def by_keys(page: object, n: int, measured: tuple, answer: str) -> None:
    """Play a patient, and the package's game beside it."""
    for name in measured:
        press(page, name, "Enter")
        if "it's free" not in DATA["patients"][n - 1]["measured"][name]:
            progress.remember("clinic", f"{n}: {name}", {})
    press(page, "choice0", answer)
    press(page, "diagnose", "Enter")
    clinic.patient(n)._first(answer)
    assert page.inner_text("#score") in progress.clinic_line()
    said = page.inner_text("#said").replace("\n\n", "\n")
    assert said.startswith("Right, " if answer == HAS[n - 1] else f"“{answer}” isn't it.")
    assert DATA["patients"][n - 1]["answers"][answer].split("\n")[0] in said


@pytest.mark.browser
def test_a_game_on_a_phone_by_keyboard_alone(opened, tmp_path):
    page = begin(opened, tmp_path, viewport={"width": 360, "height": 740})
    by_keys(page, 9, ("transcripts", "groups"), "a grader that never matches")
    assert "/github.com/unslothai/" in page.get_attribute("#said a", "href")
    press(page, "next", "Enter", "ArrowRight")
    by_keys(page, 11, (), "k1 as the loss")
    by_keys(page, 11, (), "healthy")
    press(page, "next", "Enter")
    press(page, "up", "Enter")
    assert page.inner_text("#said").startswith("Patient 12 has this: a token mean")
    clinic.patient(12)._first("given up")
    press(page, "next", "Enter", *["ArrowLeft"] * 11)
    taken = ("held-out accuracy", "transcripts", "groups")  # the first finds nothing
    by_keys(page, 2, taken, "a policy that grades its own samples")
    page.reload()
    assert page.locator("#room h2").inner_text() == "Patient 2"  # where one was
    assert page.inner_text("#score").endswith("2 right at the first attempt, 4 points")
    page.click("#again")
    assert page.inner_text("#again") == "Erase this shift's answers?"
    page.click("#again")
    assert page.inner_text("#score").startswith("0 of 28")


@pytest.mark.browser
def test_a_night_is_scored_as_the_package_scores_it_and_so_is_every_patient(opened, tmp_path):
    page, many = begin(opened, tmp_path), [*MEASUREMENTS][:3]
    for has, n in product(HAS, range(4)):
        assert page.evaluate(f"game.worth({has!r}, {n})") == progress.worth(has, many[:n])
    for name in many:
        page.click(f"[data-key='{name}']")
    assert page.locator(".measure button:disabled").count() == len(MEASUREMENTS) - 3
    page.click("[data-shift=night]")
    for place, run in enumerate(DATA["orders"][0]):
        page.locator(f"[data-key=who{place}]").dispatch_event("click")
        other = "healthy" if place % 3 else "k1 as the loss"
        given = sorted({DATA["arrivals"][run]["has"][0], other})[: 2 - place % 2]
        for at, answer in enumerate(given):
            page.select_option(f"[data-key=choice{at}]", answer)
        page.click("[data-key=diagnose]")
        said = page.inner_text("#said").split("\n\n")[:-1]  # but for the button
        assert said == clinic.night(place).judged(*given).split("\n")
    points = float(page.inner_text("#score").split(", ")[1].split()[0])
    assert f"The night shift: {points:g} of 13." in progress.clinic_line() and 3 < points < 13


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [*product((360, 1280), ("light", "dark"))])
def test_everything_can_be_read_and_nothing_has_to_be_kept(opened, tmp_path, width, scheme):
    page = begin(opened, tmp_path, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.add_init_script("Object.defineProperty(window, 'localStorage', {get() { throw 1; }})")
    page.reload()
    page.click("[data-key='scorer against sampler']")
    page.select_option("[data-key=choice0]", "dropout left on while scoring")
    page.click("[data-key=diagnose]")
    is_readable(page, f"clinic-{width}-{scheme}")
    heights = "all => all.map(text => text.getBoundingClientRect().height)"
    assert min(page.locator("svg text").evaluate_all(heights)) > 9
    assert page.inner_text("#score").startswith("1 of 28")
    page.click("[data-shift=night]")
    for place in range(14):
        page.locator(f"[data-key=who{place}]").dispatch_event("click")
        is_readable(page, f"clinic-{width}-{scheme}-night-{place}")
