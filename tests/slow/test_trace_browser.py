"""The pages of `python -m lab trace` in a real browser: what a click shows are the run's numbers.

apt-get install chromium && pytest -m slow tests/slow/test_trace_browser.py
"""

import re

import pytest

from browser import CHROMIUM, Browser, page_data
from lab.trace import Config, page, run, step_data
from small import small_drafter, small_target
from support.toy import write_byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of a decoding run, greedy and drawn, and one of a training step."""
    root = tmp_path_factory.mktemp("pages")
    target = small_target(vocab_size=264, max_position_embeddings=300)
    target.num_tokens = 258
    write_byte_tokenizer(root / "target")
    target.save_pretrained(root / "target", eos_token_id=256, pad_token_id=257)
    small_drafter(target).save_pretrained(root / "drafter")
    pair = dict(target=str(root / "target"), drafter=str(root / "drafter"), device="cpu")
    for name, temperature in (("drawn", 1.0), ("greedy", 0.0)):
        out = str(root / f"{name}.html")
        run(Config(**pair, out=out, prompt="a\n</b>", temperature=temperature, max_new_tokens=60))
    (root / "step.html").write_text(page(step_data(Config(num_anchors=4, num_branches=3, seed=15))))
    return root


def shown_numbers(browser) -> list[float]:
    cells = 'document.querySelectorAll("#panel [data-value]")'
    return browser.value(f"[...{cells}].map((cell) => Number(cell.dataset.value))")


def shown_bars(browser) -> list[float]:
    """The figures beside the bars, which have three digits."""
    figures = '[...document.querySelectorAll("#panel small")].map((e) => Number(e.textContent))'
    return browser.value(figures)


def expected(slots: list[dict], names: list[str]) -> list[float]:
    return [slot[name] for slot in slots for name in names if name in slot]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["drawn", "greedy", "step"])
def test_a_page_loads_without_an_error_and_fits_the_window(browser, pages, name, width, scheme):
    browser.open(pages / f"{name}.html", width, 800, scheme)
    assert not browser.errors
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("document.querySelector('#panel').textContent").strip()
    colour = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(255, 255, 255)") == (scheme == "light")


def test_an_error_on_a_page_is_noticed(browser, tmp_path):
    path = tmp_path / "broken.html"
    for script in ("nowhere.field = 1", "console.error('no')", "setTimeout(() => nowhere(), 0)"):
        path.write_text(f"<script>{script}</script>")
        browser.open(path)
        browser.value("new Promise((done) => setTimeout(done, 50))")
        browser.value("1")
        assert browser.errors


@pytest.mark.parametrize("name", ["drawn", "greedy"])
def test_a_click_on_a_token_shows_its_numbers(browser, pages, name):
    browser.open(pages / f"{name}.html")
    data = page_data(pages / f"{name}.html")
    verdicts = set()
    for number, row in list(enumerate(data["rounds"], 1))[:6]:
        for k, slot in enumerate(row["slots"], 1):
            browser.click(f'[data-at="{number}.{k}"]:not(.own)')
            title = browser.value('document.querySelector("#panel h2").textContent')
            assert title == f"Round {number}, k = {k} of 4"
            assert shown_numbers(browser) == expected([slot], ["p", "q", "chance", "u", "alpha"])
            figures = [x for _, *values in slot["likeliest"] for x in values]
            ends = k == row["accepted"] + 1  # the token drawn instead stands below
            figures += [x for _, x in row["own"]["likeliest"]] if ends else []
            assert shown_bars(browser) == pytest.approx(figures, abs=6e-4)
            kind = "accepted" if k <= row["accepted"] else "rejected" if ends else "unjudged"
            verdict = browser.value('document.querySelector("#panel .verdict").className')
            assert verdict == f"verdict {kind}"
            verdicts.add(kind)
        browser.click(f'.own[data-at="{number}.{row["accepted"] + 1}"]')
        own = data["pieces"][str(row["own"]["y"])].replace(" ", "␣").replace("\n", "⏎")
        assert own in browser.value('document.querySelector("#panel h3").textContent')
    assert verdicts >= {"rejected", "unjudged"} and not browser.errors
    assert name == "greedy" or "accepted" in verdicts


def test_arrows_and_enter_choose_a_token(browser, pages):
    browser.open(pages / "drawn.html")
    browser.click('[data-at="1.1"]')
    browser.value("document.querySelector('[data-at=\"1.1\"]').focus()")
    title = 'document.querySelector("#panel h2").textContent'
    browser.key("ArrowRight")
    assert browser.value(title) == "Round 1, k = 1 of 4"
    browser.key("Enter")
    focused = browser.value("document.activeElement.dataset.at")
    round_number, k = focused.split(".")
    assert browser.value(title) == f"Round {round_number}, k = {k} of 4"
    assert browser.value("document.querySelectorAll('[aria-pressed=true]').length") == 1
    assert browser.value("document.querySelectorAll('#text [tabindex=\"0\"]').length") == 1


def test_the_slider_shows_the_text_after_a_round(browser, pages):
    browser.open(pages / "drawn.html")
    data = page_data(pages / "drawn.html")
    pieces, text, committed = data["pieces"], [data["first"]], 0
    browser.click("#drafts")  # rejected drafts are no text
    browser.value('document.querySelector("#round").focus()')
    browser.key("Home")
    committed_text = """[...document.querySelectorAll("#text [data-at]")]
        .filter((e) => e.offsetParent && !e.classList.contains("cut"))
        .map((e) => e.textContent).join("")"""
    for number, row in enumerate([None, *data["rounds"]]):
        if row:
            browser.key("ArrowRight")
            drafts = [slot["y"] for slot in row["slots"]][: row["accepted"]]
            text += [*drafts, row["own"]["y"]][: row["shown"]]
            committed += row["committed"]
        said = browser.value('document.querySelector("#length").textContent')
        count, al = re.match(
            rf"{number} of {len(data['rounds'])}: (\d+) committed, (.*)", said
        ).groups()
        assert int(count) == committed
        if number:
            al = float(re.fullmatch(r"AL (\S+) so far", al)[1])
            assert al == pytest.approx(committed / number, abs=0.00501)
        wanted = "".join(pieces[str(i)].replace("\n", "⏎\n") for i in text)
        assert browser.value(committed_text) == wanted
    browser.click("#drafts")
    num_drafts = 'document.querySelectorAll("#text .rejected:not([hidden])").length'
    assert browser.value(num_drafts) == sum(row["accepted"] < 4 for row in data["rounds"])


def test_a_click_on_a_node_shows_its_numbers_and_what_it_sees(browser, pages):
    browser.open(pages / "step.html")
    data = page_data(pages / "step.html")
    names = ["p", "q", "chance", "alpha", "survival"]
    T = data["num_trunk"]
    for i, dot in enumerate(data["dots"]):
        slots = {}  # branches of one anchor share p and q
        for branch in data["branches"]:
            if i in branch["route"][1:]:
                k = branch["route"].index(i) - 1
                slots.setdefault((branch["anchor"], k), branch["slots"][k])
        browser.click(f'.dot[data-at="{i}"]')
        assert shown_numbers(browser) == expected(slots.values(), names)
        figures = [x for slot in slots.values() for row in slot["likeliest"] for x in row[1:]]
        assert shown_bars(browser) == pytest.approx(figures, abs=6e-4)
        if dot["kind"] == "node":
            seen = browser.value(
                '[...document.querySelectorAll(".dot.seen")].map((e) => Number(e.dataset.at))'
            )
            assert sorted(seen) == [j for j, bit in enumerate(data["mask"][i - T]) if bit == "1"]
            cells = browser.value('document.querySelectorAll("#mask .chosen .on").length')
            assert cells == len(seen)
    text = browser.value('document.querySelector("#loss").textContent')
    assert f"= {data['loss']:.4f}:" in text and not browser.errors
