"""The page in a real headless Chromium, on a real server whose model's logits are known."""

import functools
import json
import math
import re
from functools import partial
from pathlib import Path

import pytest

from dtgpt.config.recipe_file import recipe_module
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.posttrain.chats.prompts import ChatPrompts
from tests.support.browser import chromium, contrast, rgb_of
from tests.support.chats import write_tokenizer
from tests.support.model_by_rules import model_by_rules
from tests.support.server import live_server, served, tiny_model, wait_until

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright").expect
pytestmark = pytest.mark.slow(16)

PROMPT = "Say: "
STORY = "<b>caf\u00e9</b> \U0001f600 is open."  # a markup that must stay text, characters of several tokens
CHOSEN, OTHER = 9.0, 8.0  # logits of the story's byte and of "x" in its place; 0 for each of the other 255
TOTAL = math.exp(CHOSEN) + math.exp(OTHER) + 255
BLANKS = "b" * 80  # a prompt that tabs follow for ever
WAIT = 10_000  # milliseconds
END = 256
DESKTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
DEVICES = pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
# What a conversation is: questions, of lengths that differ, and the answers that the model gives to them.
THOUGHTS = "I <b>wonder</b>"
ANSWERS = {
    "Hello": f"<think>\n{THOUGHTS}\n</think>\n\nHi <i>you</i>",
    "Hello" + "?" * 80: "thoughts that the template opened</think>So",
    "Hello" + "?" * 300: "",
    "Hello" + "?" * 400: "<think>on and on",
}


def rules() -> list[dict]:
    """Behind PROMPT the story and its end; whatever is at other places, "ha" for ever, or blanks."""
    begin = len(PROMPT.encode()) - 1
    ids = [*STORY.encode(), END]
    story = [{"position": begin + i, "logits": {i_d: CHOSEN, ord("x"): OTHER}} for i, i_d in enumerate(ids)]
    after = {"h": "a", "b": "\t", "\t": "\t"}
    others = [{"token": ord(one), "logits": {ord(next_): 20.0}} for one, next_ in after.items()]
    return [*story, *others, {"logits": {ord("h"): 20.0}}]


@pytest.fixture(scope="module")
def service():
    with served(model_by_rules(rules(), vocab_size=257, seq_length=1024), log_requests=False) as service:
        yield service


@pytest.fixture(scope="module")
def address(service):
    with live_server(service) as address:
        yield address


@pytest.fixture(scope="module")
def chat_address(tmp_path_factory):
    """A model that answers the questions of ANSWERS, whatever else was said before, and ends anything else at once."""
    pytest.importorskip("jinja2")
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("model"))))
    shape = {"vocab_size": 320, "seq_length": 1024}
    end = tokenizer.encode_bare("<|im_end|>")[0]
    prompts = ChatPrompts(tokenizer, model_by_rules([], **shape).config)
    rules = []
    for question, answer in ANSWERS.items():
        begin = len(prompts.encode([{"role": "user", "content": question}])) - 1
        ids = [*tokenizer.encode_bare(answer), end]
        rules += [{"position": begin + i, "logits": {token: 20.0}} for i, token in enumerate(ids)]
    model = model_by_rules([*rules, {"logits": {end: 20.0}}], **shape)
    with served(model, tokenizer, log_requests=False) as service, live_server(service) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(browser):
    """Return what gives a page of a profile for each address and device, and what its tests complain of."""
    complaints: list[str] = []

    @functools.cache
    def of(at: str, options: str):
        context = browser.new_context(**json.loads(options))
        context.set_default_timeout(WAIT)
        page = context.new_page()
        page.on("request", lambda request: request.url.startswith((at, "data:")) or complaints.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: "Content Security" in said.text and complaints.append(said.text))
        page.goto(at)
        return page

    return of, complaints


@pytest.fixture
def visit(pages, address):
    """Open the page with nothing kept. Nothing may be asked of another address or refused by the browser."""
    of, complaints = pages
    visited = []

    def visit(at: str = address, **options):
        page = of(at, json.dumps({**DESKTOP, **options}))
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
        page.goto(at)  # a new page of a profile that has one costs little
        visited.append(page)
        return page

    yield visit
    for page in visited:
        page.unroute_all()
    found = complaints.copy()
    complaints.clear()
    assert not found


def ask(page, text: str = PROMPT, **settings: object) -> None:
    """Fill the settings in, write a text and send it."""
    for name, value in settings.items():
        page.evaluate("document.querySelector('#settings').open = true")
        page.fill(f"#{name}", str(value))
    page.fill("#text", text)
    page.press("#text", "Enter")


def fulfil(body: str, route) -> None:
    route.fulfill(status=200, body=body)


def ended(page) -> None:
    page.wait_for_selector("#send:visible")


def written(page) -> str:
    """The text of the last answer."""
    return page.locator(".answer").last.text_content()


@DEVICES
def test_enter_completes_a_prompt_and_tokens_have_their_probability(visit, device):
    page = visit(**device)
    assert page.get_by_role("radio").count() == 0  # a model without a template offers no chat
    assert page.title() == "tiny \u2013 dtgpt" and page.get_by_role("heading").inner_text() == "tiny"
    assert page.evaluate("document.activeElement.id") == "text"
    ask(page, temperature=0)
    ended(page)
    assert written(page) == STORY and page.locator(".question").text_content() == PROMPT
    assert page.locator("main b").count() == 0  # the markup is text
    count = len(STORY.encode()) + 1
    facts = rf"{count} tokens in \d+\.\d s, ended by itself, seed \d+.*"
    assert re.fullmatch(facts, page.inner_text(".facts"), re.DOTALL)
    assert page.input_value("#text") == PROMPT  # to be changed and sent again
    assert not page.is_visible(".tokens")
    page.check("#show-tokens")
    assert page.is_visible(".tokens") and not page.is_visible(".answer")
    tokens = page.locator(".tokens > span")
    assert tokens.count() == count
    likely = f"{100 * math.exp(CHOSEN) / TOTAL:.0f} %"
    assert tokens.nth(1).inner_text().split("\n") == ["b", likely]
    assert tokens.nth(len("<b>caf")).inner_text().split("\n")[0] == "bytes:\\xc3"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.uncheck("#show-tokens")
    assert page.is_visible(".answer")


def test_shift_and_enter_begin_a_line(visit):
    page = visit()
    page.fill("#text", "Say:")
    page.press("#text", "Shift+Enter")
    assert page.input_value("#text") == "Say:\n" and page.locator("article").count() == 0
    ask(page, "", max_tokens=4, temperature=0)  # a prompt may be empty
    ended(page)
    assert written(page) == "haha"


def test_stop_frees_the_slots_and_keeps_the_text(visit, service):
    page = visit()
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        ask(page, "other " * 8, max_tokens=900, temperature=0)
        expect(page.locator(".facts:empty")).to_have_count(1)  # the new answer's, which has not ended
        expect(page.locator(".answer").last).to_have_text(re.compile("[ha]{5}"))
        stop()
        ended(page)
        wait_until(lambda: service.worker.status().running == 0, seconds=1)
        before = written(page)
        assert (
            4 < len(before) < 900 and "ha".startswith(before[:1]) and "stopped" in page.inner_text(".facts >> nth=-1")
        )
        assert not page.is_visible("#problem")
    page.fill("#max_tokens", "10")
    page.get_by_role("button", name="Continue").last.click()
    expect(page.locator("article")).to_have_count(3)
    ended(page)
    assert page.locator(".question").last.text_content() == "other " * 8 + before
    assert len(written(page)) == 10 and set(written(page)) == {"h", "a"}
    page.click("#clear")
    assert page.locator("article").count() == 0


def test_going_on_completes_a_character_that_was_cut(visit):
    page = visit()
    ask(page, temperature=0, max_tokens=len(STORY[: STORY.index("\U0001f600")].encode()) + 2)
    ended(page)
    assert written(page).endswith("\ufffd") and "as long as it may be" in page.inner_text(".facts")
    page.fill("#max_tokens", "")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("article")).to_have_count(2)
    ended(page)
    assert page.locator(".question").last.text_content() + written(page) == PROMPT + STORY


def test_an_empty_answer_is_told(visit):
    page = visit()
    for count, (prompt, reason) in enumerate((
        (PROMPT + STORY, "it ended its answer at once"),
        (BLANKS, "its 5 tokens are blanks or the like; raise Length in the settings"),
    ), 1):  # fmt: skip
        ask(page, prompt, temperature=0, max_tokens=5)
        expect(page.locator("article")).to_have_count(count)
        ended(page)
        assert written(page) == f"The model gave no text: {reason}."
        page.check("#show-tokens")
        assert page.locator(".answer").last.is_visible() and page.locator(".tokens").last.is_visible()
        page.uncheck("#show-tokens")


def test_an_error_is_a_sentence(visit):
    page = visit()
    for name, value, told in (
        ("temperature", "101", "Temperature=101"),
        ("top_k", "-7", "Top_k=-7"),
        ("more", "{", 'Further options are not JSON; write such as {"min_p": 0.1}.'),
        ("more", '{"max_token": 3}', "There is no key 'max_token'; did you mean max_tokens?"),
    ):
        default = page.get_attribute(f"#{name}", "value") or ""
        ask(page, **{name: value})
        expect(page.get_by_role("alert")).to_contain_text(re.compile(re.escape(told), re.IGNORECASE))
        ended(page)
        assert page.locator("article").count() == 0
        page.fill(f"#{name}", default)
    page.focus("#top_k")
    page.keyboard.press("e")  # a field of numbers takes it
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("Top k: Please enter a number.")
    page.fill("#top_k", "50")
    ask(page, temperature=0, max_tokens=3)
    page.wait_for_selector("article")
    ended(page)
    assert not page.is_visible("#problem") and written(page) == STORY[:3]


def test_a_server_that_is_gone_or_full_is_a_sentence(visit):
    page = visit()
    page.route("**/v1/completions", lambda route: route.abort())
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer.")
    page.unroute("**/v1/completions")
    for body, told in (
        ('data: {"choices": []}\n\n', "The connection ended before the answer did."),
        ('data: {"error": {"message": "logits are not finite"}}\n\n', "Logits are not finite."),
    ):
        page.route("**/v1/completions", partial(fulfil, body))
        ask(page)
        expect(page.get_by_role("alert")).to_have_text(told)
        ended(page)
        assert page.locator("article").count() == 0
        page.unroute("**/v1/completions")
    full = {"status": 429, "headers": {"Retry-After": "7"}, "body": '{"error": {"message": "the queue is full"}}'}
    page.route("**/v1/completions", lambda route: route.fulfill(**full))
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("The queue is full. Try again in 7 s.")


def test_a_key_is_asked_for_and_kept_in_the_tab(visit, service):
    service.api_key = "secret"
    try:
        with live_server(service) as address:
            page = visit(address)
            assert not page.is_visible("#key")
            ask(page)
            expect(page.get_by_role("alert")).to_have_text("This server needs an API key; type it in under Settings.")
            assert page.evaluate("document.activeElement.id") == "key"
            page.keyboard.type("wrong")
            ask(page)
            expect(page.get_by_role("alert")).to_contain_text("does not accept this API key")
            page.fill("#key", "secret")
            ask(page, temperature=0, max_tokens=3)
            page.wait_for_selector("article")
            ended(page)
            assert written(page) == STORY[:3] and not page.is_visible("#problem")
            assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
            page.reload()
            ask(page, temperature=0, max_tokens=3)
            page.wait_for_selector("article")
    finally:
        service.api_key = None


def test_settings_are_sent_with_further_options(visit):
    page = visit()
    with page.expect_request("**/v1/completions") as found:
        ask(page)
    sent = found.value.post_data_json
    assert (sent["temperature"], sent["top_k"], sent["max_tokens"]) == (0.8, 50, 200) and "seed" not in sent
    ended(page)
    with page.expect_request("**/v1/completions") as found:
        ask(page, top_k="", top_p=0.5, seed=3, more='{"stop": ["a"], "min_p": 0.25}')
    sent = found.value.post_data_json
    expected = {"top_p": 0.5, "seed": 3, "stop": ["a"], "min_p": 0.25, "prompt": PROMPT, "stream": True}
    assert {name: sent[name] for name in expected} == expected and "top_k" not in sent
    ended(page)
    assert "seed 3" in page.inner_text(".facts >> nth=1")


@pytest.fixture(scope="module")
def short_address():
    """The model of README's first command, of 64 positions; its weights are random."""
    config = recipe_module([str(Path(__file__).parents[2] / "recipes/gpt2_tiny.py")], "train").recipe().model
    with served(tiny_model(**vars(config)), log_requests=False) as service, live_server(service) as address:
        yield address


def test_the_first_click_works_with_the_model_of_readme(visit, short_address):
    page = visit(short_address, **PHONE)
    page.fill("#text", "Once upon a time")
    page.click("#send")
    page.wait_for_selector("article")
    ended(page)
    assert not page.is_visible("#problem"), page.inner_text("#problem")
    assert 0 < int(page.inner_text(".facts").split()[0]) <= 64 - len("Once upon a time")


def test_no_length_is_refused_for_what_the_model_has_no_positions_for(visit, short_address):
    page = visit(short_address)
    ask(page, "Hello", max_tokens=1000, more='{"ignore_eos": true}')
    ended(page)
    assert page.inner_text(".facts").startswith("59 tokens") and not page.is_visible("#problem")
    ask(page, "x" * 70)
    expect(page.get_by_role("alert")).to_have_text(
        "The prompt has 70 tokens, and the model has 64 positions; shorten the prompt."
    )


def test_a_chat_folds_thoughts_and_sends_all_of_it_again(visit, chat_address):
    page = visit(chat_address, **PHONE)
    assert page.get_by_role("radio", name="Chat").is_checked()
    first, second, *_ = ANSWERS
    with page.expect_request("**/v1/chat/completions"):
        ask(page, first)
    ended(page)
    assert written(page) == "Hi <i>you</i>" and page.locator("main i").count() == 0
    assert page.inner_text(".thoughts summary") == "Thoughts" and not page.is_visible(".thought")
    page.click(".thoughts summary")
    assert page.inner_text(".thought") == THOUGHTS and page.input_value("#text") == ""
    with page.expect_request("**/v1/chat/completions") as found:
        ask(page, "and?")
    roles = [message["role"] for message in found.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert found.value.post_data_json["messages"][1]["content"] == ANSWERS[first]
    ended(page)
    page.click("#clear")
    ask(page, second)
    page.wait_for_selector("article")
    ended(page)
    assert written(page) == "So" and page.locator(".thought").text_content() == "thoughts that the template opened"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_empty_answer_of_a_chat_is_told_and_the_question_can_be_sent_again(visit, chat_address):
    page = visit(chat_address)
    _, _, empty, thoughts = ANSWERS
    ask(page, empty)
    ended(page)
    assert written(page) == "The model gave no text: it ended its answer at once."
    assert page.input_value("#text") == empty
    ask(page, thoughts)
    expect(page.locator("article")).to_have_count(2)
    ended(page)
    assert written(page) == "The model gave no text: it ended after its thoughts."
    with page.expect_request("**/v1/chat/completions") as found:
        ask(page, thoughts, max_tokens=3)
    assert len(found.value.post_data_json["messages"]) == 1  # what has no answer is not said again
    expect(page.locator("article")).to_have_count(3)
    ended(page)
    assert "its tokens were spent on thoughts" in written(page)


def test_a_chat_model_completes_prompts_too(visit, chat_address):
    page = visit(chat_address)
    page.get_by_role("radio", name="Complete").check()
    assert page.inner_text("#text-label") == "Prompt"
    with page.expect_request("**/v1/completions"):
        ask(page, "Hello")
    ended(page)
    page.get_by_role("radio", name="Chat").check()
    assert page.locator("article:visible").count() == 0 and page.inner_text("#text-label") == "Message"


@DEVICES
def test_margins_and_what_covers_what(visit, device):
    page = visit(**device)
    ask(page, "other " * 8, temperature=0)
    ended(page)
    width, height = device["viewport"].values()
    for selector in ("h1", "article", "#text", "#send", "#settings summary"):
        box = page.locator(selector).bounding_box()
        assert box["x"] >= 12 and box["x"] + box["width"] <= width - 12, selector
    assert page.locator("#send").bounding_box()["y"] + 30 < height  # in reach while answers scroll
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    sizes = page.evaluate(
        "[...document.querySelectorAll('textarea, input')].map((one) => getComputedStyle(one).fontSize)"
    )
    assert set(sizes) == {"16px"}  # of smaller ones a phone enlarges the page
    assert page.is_visible("#keys") == (device is DESKTOP)
    ask(page, "other " * 8, temperature=0)  # below the settings, which are open now
    expect(page.locator("article")).to_have_count(2)
    ended(page)
    bottom = page.locator(".answer").last.bounding_box()
    assert bottom["y"] + bottom["height"] <= page.locator("form").bounding_box()["y"]


def test_every_control_has_a_label(visit, chat_address):
    page = visit(chat_address)
    page.evaluate(
        "for (const one of document.querySelectorAll('[hidden], details')) { one.hidden = false; one.open = true; }"
    )
    for role, names in {
        "textbox": ["Message", "Further options", "API key"],
        "spinbutton": ["Length", "Temperature", "Top k", "Top p", "Seed"],
        "button": ["Send", "Stop", "Clear"],
        "radio": ["Complete", "Chat"],
        "checkbox": ["Tokens"],
        "group": ["What to ask for"],
    }.items():
        for name in names:
            assert page.get_by_label(name).count() or page.get_by_role(role, name=name).count(), name
    assert page.evaluate("[...document.querySelectorAll('input, textarea')].every((one) => one.labels.length === 1)")
    assert page.get_attribute("html", "lang") == "en" and page.get_by_role("main").count() == 1


def test_text_is_readable_in_light_and_dark(visit, chat_address):
    page = visit(chat_address, color_scheme="light")
    page.evaluate("document.querySelector('#settings').open = true")
    ask(page, "Hello")
    ended(page)
    page.click(".thoughts summary")
    page.evaluate("explain('A sentence.')")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        paper, card = rgb_of(page, "body", "backgroundColor"), rgb_of(page, "article", "backgroundColor")
        assert (sum(paper) > 600) == (scheme == "light")
        assert contrast(rgb_of(page, "body", "color"), paper) > 10
        for selector, behind in (
            ("small", paper), ("#keys", paper), ("#problem", paper), ("summary", paper), ("#text-label", paper),
            (".facts", card), (".question", card), (".thought", card), (".thoughts summary", card), (".answer", card),
            ("#send", rgb_of(page, "#send", "backgroundColor")), ("#text", rgb_of(page, "#text", "backgroundColor")),
        ):  # fmt: skip
            assert contrast(rgb_of(page, selector, "color"), behind) >= 4.5, (scheme, selector)
        for selector in ("#text", "#max_tokens", "#clear"):  # the bounds of a control
            assert contrast(rgb_of(page, selector, "borderTopColor"), paper) >= 3, (scheme, selector)
        page.check("#show-tokens")
        page.evaluate("document.querySelector('.tokens span').style.setProperty('--p', 0)")  # the darkest
        darkest = rgb_of(page, ".tokens span", "backgroundColor")
        assert contrast(rgb_of(page, ".tokens span", "color"), darkest) >= 4.5
        page.uncheck("#show-tokens")
