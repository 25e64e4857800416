"""The page in a real headless Chromium, on a real server whose model's logits are known."""

import math
import re
from pathlib import Path

import pytest

from dtgpt.commands.generate import NEW_TOKENS, GenerateOptions
from dtgpt.config.recipe_file import recipe_module
from dtgpt.serve import openai_keys
from tests.support.browser import chromium, contrast, rgb_of
from tests.support.model_by_rules import model_by_rules
from tests.support.server import live_server, served, tiny_model, wait_until

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright").expect

PROMPT = "Say: "
STORY = "<b>caf\u00e9</b> \U0001f600 is open."  # a markup that must stay text, characters of several tokens
CHOSEN, OTHER = 9.0, 8.0  # logits of the story's byte and of "x" in its place; 0 for each of the other 255
TOTAL = math.exp(CHOSEN) + math.exp(OTHER) + 255
WAIT = 10_000  # milliseconds
END = 256
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def rules() -> list[dict]:
    """Behind PROMPT the story and its end; whatever is at other places, "ha" for ever."""
    begin = len(PROMPT.encode()) - 1
    ids = [*STORY.encode(), END]
    story = [{"position": begin + i, "logits": {i_d: CHOSEN, ord("x"): OTHER}} for i, i_d in enumerate(ids)]
    return [*story, {"token": ord("h"), "logits": {ord("a"): 20.0}}, {"logits": {ord("h"): 20.0}}]


def probability(logit: float) -> str:
    return f"{100 * math.exp(logit) / TOTAL:.1f} %"


@pytest.fixture(scope="module")
def service():
    with served(model_by_rules(rules(), vocab_size=257, seq_length=1024), log_requests=False) as service:
        yield service


@pytest.fixture(scope="module")
def address(service):
    with live_server(service) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser, address):
    """Open the page in a new profile. Nothing may be asked of another address or refused by the browser."""
    contexts, complaints = [], []

    def visit(at: str = address, fragment: str = "", **options):
        context = browser.new_context(**options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: request.url.startswith(at) or complaints.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: "Content Security" in said.text and complaints.append(said.text))
        page.goto(f"{at}/{fragment}")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not complaints


def ask(page, text: str = PROMPT, **settings: object) -> None:
    for name, value in settings.items():
        field = page.locator(f"#field-{name}")
        if not field.is_visible():
            page.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
        field.fill(str(value))
    page.fill("#prompt", text)
    page.press("#prompt", "Control+Enter")


def ended(page) -> None:
    page.wait_for_selector("#generate:visible")


def written(page, place: int = 0) -> str:
    """The text of an answer, without what stands before it."""
    return "".join(page.locator(".text").nth(place).locator(".t:not(.lead)").all_text_contents())


def test_types_submits_and_reads_the_stream(visit):
    page = visit()
    expect(page.locator("#model")).to_have_text("tiny")
    ask(page, temperature=0)
    ended(page)
    assert written(page) == STORY
    assert page.locator(".text .lead").text_content() == PROMPT
    assert page.locator(".text b").count() == 0  # the markup is text
    assert page.locator(".t.end").count() == 1
    assert "ended by itself" in page.inner_text(".facts")
    assert re.match(rf"{len(STORY.encode()) + 1} tokens in \d", page.inner_text("#status"))
    expect(page.locator("#count")).to_have_text(f"{len(PROMPT)} tokens")


def test_pointing_at_a_token_shows_what_else_could_have_come_and_goes_on_from_it(visit):
    page = visit()
    ask(page, temperature=0, max_tokens=12)
    ended(page)
    page.hover(".t >> nth=1")
    rows = page.locator("#popover button")
    assert rows.first.inner_text().split() == ["b", *probability(CHOSEN).split()]
    assert rows.nth(1).inner_text().split() == ["x", *probability(OTHER).split()]
    rows.nth(1).click()
    page.wait_for_selector(".t.fixed")
    ended(page)
    assert written(page)[:7] == "<x>caf\u00e9"  # the story goes on behind the other letter
    assert page.inner_text(".t.fixed") == "x" and page.inner_text("#place") == "2 of 2"
    page.click("#older")
    assert written(page).startswith("<b>") and page.locator(".t.fixed").count() == 0


def test_tokens_by_keyboard(visit):
    page = visit()
    ask(page, temperature=0, max_tokens=6)
    ended(page)
    page.focus(".text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".t.selected") == "b"
    assert f"b {probability(CHOSEN)}; x {probability(OTHER)}" in page.text_content("#spoken")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent").startswith("x")
    page.keyboard.press("Escape")
    assert not page.is_visible("#popover") and page.evaluate("document.activeElement.className") == "text"
    page.keyboard.press("End")
    assert page.inner_text(".t.selected") == "f"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")  # goes on from the other letter
    page.wait_for_selector(".t.fixed")
    ended(page)
    assert written(page)[:6] == "<b>cax"


def test_stop_frees_the_slots_and_keeps_the_text(visit, service):
    page = visit()
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        ask(page, "other " * 8, max_tokens=900, temperature=0)
        page.wait_for_selector(".t >> nth=4", state="attached")
        stop()
        ended(page)
        wait_until(lambda: service.worker.status().running == 0, seconds=1)
        before = written(page)
        assert 4 < len(before) < 900 and "ha".startswith(before[:1]) and "stopped" in page.inner_text(".facts")
        assert not page.is_visible("#problem")
    page.fill("#field-max_tokens", "10")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#place")).to_have_text("3 of 3")
    ended(page)
    after = written(page)
    assert after.startswith(before) and len(after) == len(before) + 10 and set(after) == {"h", "a"}
    page.check("input[value=beams]", force=True)
    ask(page, "other " * 8, beam_width=4, max_tokens=900)
    wait_until(lambda: service.worker.status().running > 0)
    page.keyboard.press("Escape")
    ended(page)
    wait_until(lambda: service.worker.status().running == 0, seconds=1)
    assert page.inner_text("#place") == "3 of 3" and written(page) == after  # nothing has come of the search


def test_going_on_completes_a_character_that_was_cut(visit):
    page = visit()
    cut = len(STORY[: STORY.index("\U0001f600")].encode()) + 2
    ask(page, temperature=0, max_tokens=cut)
    ended(page)
    assert written(page).endswith("\ufffd")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#place")).to_have_text("2 of 2")
    ended(page)
    assert written(page) == STORY


def test_several_answers_side_by_side(visit):
    page = visit()
    ask(page, n=3, temperature=0)
    ended(page)
    boxes = [card.bounding_box() for card in page.locator(".card").all()]
    assert [written(page, i) for i in range(3)] == [STORY] * 3
    assert len({box["y"] for box in boxes}) == 1 and len({box["x"] for box in boxes}) == 3


def test_the_prompt_can_have_its_probabilities_and_may_be_empty(visit):
    page = visit()
    page.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
    page.check("#field-echo")
    ask(page, temperature=0)
    ended(page)
    assert "".join(page.locator(".t.lead").all_text_contents()) == PROMPT and written(page) == STORY
    page.hover(".t >> nth=0")
    assert page.inner_text("#popover .hint") == "The first token has no probability."
    page.hover(".t >> nth=1")
    assert page.locator("#popover button").count() > 4 and page.locator("#popover button:enabled").count() == 0
    page.uncheck("#field-echo")
    ask(page, "", max_tokens=4)
    expect(page.locator("#place")).to_have_text("2 of 2")
    ended(page)
    assert written(page) == "haha"
    page.check("input[value=beams]", force=True)
    ask(page, "", beam_width=1)
    expect(page.locator("#place")).to_have_text("3 of 3")
    ended(page)
    assert written(page) == "haha" and page.inner_text(".text .lead") == "<|endoftext|>"


def test_beams_side_by_side_with_scores_and_probabilities(visit):
    page = visit()
    page.check("input[value=beams]", force=True)
    ask(page, beam_width=2, max_tokens=4)
    ended(page)
    assert [written(page, i) for i in range(2)] == ["<b>c", "<b>x"]  # all alternatives are equally likely
    boxes = [card.bounding_box() for card in page.locator(".card").all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    score = math.log(math.exp(CHOSEN) / TOTAL)
    assert page.locator(".card .note").first.inner_text() == f"{score:.3f}".replace("-", "\u2212")
    assert page.locator(".card >> nth=1").locator(".t.shared").all_text_contents() == ["<", "b", ">"]
    page.hover(".card >> nth=1 >> .t >> nth=3")
    assert page.locator("#popover .chosen").inner_text().split() == ["x", *probability(OTHER).split()]


def test_an_error_is_a_sentence_beside_its_field(visit):
    page = visit()
    for name, value, sentence in (
        ("temperature", "hot", "Temperature is hot, but must be a number from 0 to 100."),  # of the page
        ("logit_bias", "no", "Logit bias has no; write an id and a number, as in 50256: -100."),
        ("top_k", "9" * 12, "Top k 999999999999 is not valid; use a whole number from"),  # of the server
        ("stop_token_ids", "300", "Stop at ids"),
        ("min_tokens", "1000", "Length at least 1000"),
        ("no_repeat_ngram_size", "9" * 12, "No n-gram twice 999999999999 is not valid"),
    ):
        ask(page, **{name: value})
        expect(page.locator("#problem")).to_contain_text(sentence)
        assert page.get_attribute(f"#field-{name}", "aria-invalid") == "true", name
        assert "_" not in page.inner_text("#problem"), "a key in place of a label"
        page.fill(f"#field-{name}", "")
    ask(page, temperature=0, max_tokens=3)
    page.wait_for_selector(".t")
    ended(page)
    assert not page.is_visible("#problem") and written(page) == STORY[:3]


def test_a_server_that_is_gone_is_a_sentence(visit):
    page = visit()
    page.route("**/v1/completions", lambda route: route.abort())
    ask(page)
    page.wait_for_selector("#problem:visible")
    assert page.inner_text("#problem").startswith("The server does not answer.")
    page.unroute("**/v1/completions")
    page.route("**/v1/completions", lambda route: route.fulfill(status=200, body='data: {"choices": []}\n\n'))
    ask(page)
    expect(page.locator("#problem")).to_contain_text("The connection ended before the answer did.")


def test_a_model_that_is_known_late_hides_no_problem(visit):
    page, held = visit(), []
    page.route("**/v1/models", lambda route: held.append(route))  # a builtin is not taken
    page.route("**/v1/completions", lambda route: route.abort())
    page.reload()
    ask(page)
    page.wait_for_selector("#problem:visible")
    held[0].continue_()
    expect(page.locator("#model")).to_have_text("tiny")
    assert page.inner_text("#problem").startswith("The server does not answer.")


def test_a_key_is_asked_for_kept_in_the_tab_and_out_of_links(visit, service):
    service.api_key = "secret"
    try:
        with live_server(service) as address:
            page = visit(address)
            page.wait_for_selector("#problem:visible")
            assert page.inner_text("#problem") == "This server needs an API key; type it in under Server."
            assert page.evaluate("document.activeElement.id") == "field-key"
            page.keyboard.type("secret")
            page.keyboard.press("Tab")
            expect(page.locator("#model")).to_have_text("tiny")
            ask(page, temperature=0, max_tokens=3)
            page.wait_for_selector(".t")
            ended(page)
            assert written(page) == STORY[:3] and not page.is_visible("#problem")
            page.click("#link")
            assert "secret" not in page.url and "secret" not in page.evaluate("JSON.stringify(localStorage)")
            page.reload()
            expect(page.locator("#model")).to_have_text("tiny")
    finally:
        service.api_key = None


def test_settings_stay_and_go_into_a_link(visit):
    page = visit()
    ask(page, "Say: more", temperature=0.25, stop="\\n\\n", seed=7)
    ended(page)
    page.reload()
    assert page.input_value("#field-temperature") == "0.25" and page.input_value("#prompt") == "Say: more"
    page.click("#link")
    other = visit(fragment=page.url[page.url.index("#") :])
    assert other.input_value("#prompt") == "Say: more" and other.input_value("#field-seed") == "7"
    assert other.input_value("#field-stop") == "\\n\\n"
    other.get_by_role("button", name="Reset settings").click()
    assert other.input_value("#field-temperature") == "0.8"


def test_every_sampling_option_is_on_the_page_and_is_sent(visit):
    page = visit()
    fields = page.evaluate("import('/web/fields.js').then(({ FIELDS }) => FIELDS)")
    others = {"model", "prompt", "best_of", "logprobs", "stream", "stream_options", "suffix", "user", "do_sample"}
    unsupported = {
        name for name, key in openai_keys.KEYS.items() if key.read.__qualname__.startswith(openai_keys.only.__name__)
    }  # fmt: skip
    others |= unsupported | {"return_token_ids"}
    assert {field["v1"] for field in fields if "v1" in field} == {*openai_keys.KEYS, *openai_keys.OPTION_KEYS} - others
    page.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
    values = {"stop": "a\\n", "stop_token_ids": "5, 6", "logit_bias": "7: 1.5", "top_p": "0.5", "seed": "3", "n": "2"}
    sent = {"stop": ["a\n"], "stop_token_ids": [5, 6], "logit_bias": {"7": 1.5}, "top_p": 0.5, "seed": 3, "n": 2}
    for field in fields:
        name = field["name"]
        if field.get("v1") and field["kind"] == "switch":
            page.check(f"#field-{name}")
            sent[field["v1"]] = True
        elif field.get("v1"):
            if name not in values:
                values[name], sent[field["v1"]] = "0.5", 0.5
                if field["step"] == 1:
                    values[name], sent[field["v1"]] = "4", 4
            page.fill(f"#field-{name}", values[name])
    with page.expect_request("**/v1/completions") as found:
        ask(page)
    body = found.value.post_data_json
    assert {name: body.get(name) for name in sent} == sent
    page.wait_for_selector(".t, #problem:visible")
    ended(page)
    assert not page.is_visible("#problem")


@pytest.fixture(scope="module")
def short_address():
    """The model of README's first command, of 64 positions; its weights are random."""
    config = recipe_module([str(Path(__file__).parents[2] / "recipes/gpt2_tiny.py")], "train").recipe().model
    with served(tiny_model(**vars(config)), log_requests=False) as service, live_server(service) as address:
        yield address


@pytest.mark.parametrize("device, mode", [({}, "sample"), ({}, "beams"), (PHONE, "sample")])
def test_the_first_click_works_with_the_model_of_readme(visit, short_address, device, mode):
    page = visit(short_address, **device)
    expect(page.locator("#positions")).to_contain_text("64 positions")
    for i in range(page.locator(".example").count() if mode == "sample" else 1):
        page = visit(short_address, **device)
        if mode == "beams":
            page.evaluate("document.querySelector('#settings').open = true")
            page.check("input[value=beams]", force=True)
        example = page.locator(".example").nth(i)
        prompt = example.inner_text()
        example.click()
        page.click("#generate")
        page.wait_for_selector(".text")
        ended(page)
        assert not page.is_visible("#problem"), page.inner_text("#problem")
        if mode == "sample":
            assert 0 < page.locator(".t").count() <= 64 - len(prompt)


def test_no_length_is_refused_for_what_the_model_has_no_positions_for(visit, short_address):
    page = visit(short_address)
    expect(page.locator("#positions")).to_contain_text("64 positions")
    assert page.input_value("#field-max_tokens") == "64"
    page.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
    page.check("#field-ignore_eos")
    ask(page, "Hello", max_tokens=1000, n=2)
    ended(page)
    assert page.locator(".card >> nth=1").locator(".t").count() == 59 and not page.is_visible("#problem")
    page.get_by_role("button", name="Continue").first.click()
    expect(page.locator("#problem")).to_have_text(
        "The text has 64 tokens, and the model has 64 positions; choose another one of its tokens to go on from."
    )
    ask(page, "x" * 70)
    expect(page.locator("#problem")).to_have_text(
        "The prompt has 70 tokens, and the model has 64 positions; shorten the prompt."
    )
    assert page.get_attribute("#prompt", "aria-invalid") == "true"
    ask(page, "", max_tokens="", n="")
    ended(page)
    assert page.locator(".t").count() == 63 and not page.is_visible("#problem")


def test_defaults_are_those_of_the_command(visit):
    names = {"max_tokens": "max_new_tokens", "n": "num_samples", "min_tokens": "min_new_tokens"}
    command = {**vars(GenerateOptions()), "max_new_tokens": NEW_TOKENS}
    page = visit()
    fields = page.evaluate("import('/web/fields.js').then(({ FIELDS }) => FIELDS)")
    initial = {names.get(field["name"], field["name"]): field["initial"] for field in fields}
    compared = {name for name in initial if name in command and initial[name] != ""}
    assert {"max_new_tokens", "temperature", "top_k", "top_p", "length_penalty"} < compared
    assert {name: initial[name] for name in compared} == {name: command[name] for name in compared}
    with page.expect_request("**/v1/completions") as found:
        ask(page)
    body = found.value.post_data_json
    assert (body["temperature"], body["top_k"], body["max_tokens"]) == (0.8, 50, 200)


@pytest.mark.parametrize("device", [PHONE, {"viewport": {"width": 390, "height": 844}}], ids=["phone", "narrow"])
def test_a_phone_names_no_keys_and_its_bar_covers_nothing(visit, device):
    page = visit(**device)
    page.fill("#prompt", PROMPT)
    page.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
    page.wait_for_timeout(50)
    top = page.locator("#actions").bounding_box()["y"]
    assert page.evaluate("document.body.getBoundingClientRect().bottom") <= top + 1
    hidden = """(top) => [...document.querySelectorAll('.field:not([hidden]) input:not([type=range]), .modes input')]
      .filter((field) => {
        field.scrollIntoView({ block: 'nearest' });
        return field.getBoundingClientRect().bottom > top + 1;
      }).map((field) => field.name)"""
    assert page.evaluate(hidden, top) == []
    page.click("#generate")
    assert page.locator("kbd:visible").count() == 0
    ended(page)
    assert page.locator("kbd:visible").count() == 0
    assert not page.is_visible(".pointer") and page.is_visible(".touch")


def test_a_desktop_names_its_keys(visit):
    page = visit()
    assert page.inner_text("#generate kbd") in ("Ctrl ↵", "⌘↵")
    ask(page, temperature=0)
    ended(page)
    assert page.is_visible(".pointer") and not page.is_visible(".touch")


def test_a_phone(visit):
    page = visit(**PHONE)
    page.fill("#prompt", PROMPT)
    page.tap("#settings > summary")
    page.fill("#field-temperature", "0")
    page.tap("#settings > summary")
    page.tap("#generate")
    ended(page)
    assert written(page) == STORY
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#generate").bounding_box()["y"] < 740
    page.tap(".t >> nth=1")
    box = page.locator("#popover").bounding_box()
    assert (box["x"], box["width"]) == (0, 360) and box["y"] + box["height"] == pytest.approx(740, abs=1)
    page.locator("#popover button").nth(1).tap()
    page.wait_for_selector(".t.fixed")
    ended(page)
    assert written(page).startswith("<x>")


def test_text_is_readable_in_light_and_dark(visit):
    page = visit(color_scheme="light")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        paper = rgb_of(page, "body", "backgroundColor")
        assert is_light(page) == (scheme == "light")
        assert contrast(rgb_of(page, "body", "color"), paper) > 10
        assert contrast(rgb_of(page, ".hint", "color"), paper) > 4.5
        assert contrast(rgb_of(page, "#generate", "color"), rgb_of(page, "#generate", "backgroundColor")) > 4.5
    page.click("#theme")  # against what the machine says, from now on
    assert is_light(page)
    page.reload()
    assert is_light(page)


def is_light(page) -> bool:
    return sum(rgb_of(page, "body", "backgroundColor")) > 600
