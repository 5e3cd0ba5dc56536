"""quiz_card: what its state tells before an answer, and its script in a page without Jupyter."""

import json
import re

import pytest

from zerolab import lab
from zerolab.lab import quiz_grade
from zerolab_widgets import QuizCard, theme

CHAPTERS = ("00", "01")


@pytest.fixture(autouse=True)
def _no_workspace(monkeypatch, tmp_path):
    monkeypatch.delenv("ZEROLAB_WORKSPACE", raising=False)


def a_card(chapter="01"):
    return QuizCard(lab.quiz(chapter))


def state_of(card):
    return json.dumps({k: getattr(card, k) for k in card.keys if k != "layout" and k[0] != "_"},
                      default=str)  # fmt: skip


def number_of(card, name):
    """The place of the first question with this id or of this kind."""
    return next(
        i for i, question in enumerate(card.questions) if name in (question["id"], question["kind"])
    )


def right_answer(asked):
    """The right answer as the browser would send it, with positions as shown."""
    question = asked.question
    if question.kind == "numeric":
        return repr(quiz_grade.key_of(question))
    if question.kind == "ordering":
        return [asked.order.index(i) for i in range(len(question.items))]
    shown = [asked.order.index(p) for p in question.right]
    return shown if question.kind == "multiple" else shown[0]


def secrets(question):
    """Texts that would tell the answer of a question."""
    yield question.why
    yield from (choice.feedback for choice in question.choices)
    yield from (choice.misconception for choice in question.choices if choice.misconception)
    yield from (trap.feedback for trap in question.traps)
    yield from (item.feedback for item in question.items if item.feedback)
    yield from (point.point for point in question.rubric)
    if question.kind == "numeric":
        yield question.key
        yield f'"{quiz_grade.key_of(question)}'
    if question.kind == "short":
        yield question.answer


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_neither_state_nor_fallback_tells_an_answer(chapter):
    card = a_card(chapter)
    told = [state_of(card), card.to_html(), repr(card)]
    for asked in card._quiz.asked:
        for secret in secrets(asked.question):
            escaped = json.dumps(secret)[1:-1]
            assert not any(secret in text or escaped in text for text in told), secret
    for question in card.questions:
        assert not {"correct", "answer", "key", "choices", "traps", "why"} & set(question)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_items_are_never_shown_in_the_right_order(chapter):
    for asked in lab.quiz(chapter).asked:
        if asked.question.items:
            shown = asked.question.items[asked.order[0]], list(asked.order)
            assert shown[1] != sorted(shown[1])


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_state_stays_under_50_kb_even_when_everything_is_answered(chapter):
    card = a_card(chapter)
    assert len(state_of(card)) < 50_000
    for number, _ in enumerate(card.questions):
        card.request = {"serial": number + 1, "number": number, "reveal": True}
    assert len(card.results) == len(card.questions)
    assert len(state_of(card)) < 50_000


def test_an_answer_is_marked_in_python():
    card = a_card()
    at = number_of(card, "01-bytes-a-parameter")
    card.request = {"serial": 1, "number": at, "answer": "12"}
    verdict = card.results[str(at)]
    assert verdict["outcome"] == "wrong" and verdict["serial"] == 1
    assert not verdict["answer"] and not verdict["why"]
    assert "optimizer" in verdict["notes"][0]["text"]
    card.request = {"serial": 2, "number": at, "answer": "16 B"}
    assert card.results[str(at)]["outcome"] == "right" and card.results[str(at)]["why"]


def test_every_question_can_be_answered_right_through_the_card():
    for chapter in CHAPTERS:
        card = a_card(chapter)
        for number, asked in enumerate(card._quiz.asked):
            if asked.question.kind == "short":
                text = asked.question.answer
                card.request = {"serial": 1, "number": number, "answer": text}
                assert card.results[str(number)]["outcome"] == "judge"
                answer = list(range(len(asked.question.rubric)))
            else:
                answer = right_answer(asked)
            card.request = {"serial": 2, "number": number, "answer": answer}
            assert card.results[str(number)]["outcome"] == "right", asked.question.id


@pytest.mark.parametrize(
    "request_",
    [{}, {"number": 99}, {"number": -1}, {"number": "0"}, {"number": True}, {"answer": 1}],
)
def test_a_request_for_no_question_is_ignored(request_):
    card = a_card()
    card.request = {"serial": 7, **request_}
    assert card.results == {}


@pytest.mark.parametrize("answer", [None, 99, -1, "x", [], [0, 0], {"a": 1}, True, [["0"]]])
def test_nonsense_from_the_browser_is_refused(answer):
    card = a_card()
    for number in range(len(card.questions)):
        card.request = {"serial": repr(answer), "number": number, "answer": answer}
        assert card.results[str(number)]["outcome"] == "refused"


def test_repr_and_fallback_are_the_same_twice():
    assert repr(a_card()) == repr(a_card()) == "QuizCard: Quiz 01: Where memory goes, 12 questions"
    assert a_card().to_html() == a_card().to_html()
    data, _ = a_card()._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "text/plain", "text/html"}
    assert "zerolab quiz 01" in data["text/html"]
    assert "model_state_gb" in data["text/html"]


def test_what_was_right_before_is_shown_as_such(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))
    card = a_card()
    at = number_of(card, "01-grows-with-the-batch")
    assert not card.questions[at]["before"]
    card.request = {"serial": 1, "number": at, "answer": 2}
    again = a_card()
    assert again.questions[at]["before"] and again.results == {}
    assert repr(again) == repr(card), "a saved notebook does not depend on who ran it"
    assert again.to_html() == card.to_html()


@pytest.mark.parametrize("paper", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_right_and_wrong_have_contrast_on_both_grounds(paper):
    for ground in (paper.paper, paper.track):
        for ink in (paper.ink, paper.muted, paper.good, paper.alarm):
            assert theme.contrast(ink, ground) >= 4.5
    assert theme.contrast(paper.good_ink, paper.good) >= 4.5
    assert theme.contrast(paper.line, paper.paper) >= 3, "the border of a field"


def test_style_and_script_name_no_colour():
    for path in (QuizCard._css, QuizCard._esm):
        text = str(path)
        assert not re.findall(
            r"#[0-9a-fA-F]{3,8}\b|rgba?\(|\b(?:red|green|white|black)\b(?!-)", text
        )


# The script.


class Browser:
    """A page with the card's script, and Python on the other end, as in a notebook."""

    def __init__(self, page, card):
        self.page, self.card = page, card

    def sync(self):
        """Carry a request to Python and the verdict back."""
        request = self.page.evaluate("window.model.get('request')")
        self.card.request = request
        results = json.dumps(self.card.results)
        self.page.evaluate(f"window.model.set('results', {results})")

    def click(self, text):
        self.page.get_by_role("button", name=text, exact=True).click()

    def go(self, name):
        self.page.locator(".zl-step").nth(number_of(self.card, name)).click()

    @property
    def outcome(self):
        return self.page.locator(".zl-outcome").inner_text()


@pytest.fixture
def open_card(draw):
    def open_(chapter="01", *, dark=False, width=820):
        card = a_card(chapter)
        page = draw("quiz_card", card, dark=dark, width=width)
        page.set_viewport_size({"width": width, "height": 640})
        return Browser(page, card)

    return open_


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_shows_why_an_answer_is_wrong_and_lets_one_try_again(open_card, keep, dark):
    look = "dark" if dark else "light"
    browser = open_card(dark=dark)
    page = browser.page
    browser.go("01-grows-with-the-batch")
    page.locator(".zl-entry").nth(0).click()
    browser.click("Check")
    browser.sync()
    assert "Not yet." in browser.outcome and "summed over the batch" in browser.outcome
    assert page.locator(".zl-outcome").get_attribute("role") == "status"
    assert page.locator(".zl-marked-wrong").get_attribute("data-entry") == "0"
    keep(page, f"quiz_wrong_{look}")
    page.locator(".zl-entry").nth(2).click()
    browser.click("Check again")
    browser.sync()
    assert "Right." in browser.outcome and "every token" in browser.outcome
    assert page.locator(".zl-score").inner_text() == "1 of 12 right"
    keep(page, f"quiz_right_{look}")
    for name in ("multiple", "numeric", "ordering", "bug", "short", "01-nvidia-smi"):
        browser.go(name)
        keep(page, f"quiz_{name}_{look}")


@pytest.mark.browser
def test_script_takes_a_number_with_a_unit_by_keyboard(open_card, keep):
    browser = open_card()
    page = browser.page
    browser.go("01-fine-tune-7b")
    assert page.evaluate("document.activeElement.tagName") == "INPUT"
    page.keyboard.type("14")
    page.keyboard.press("Enter")
    browser.sync()
    assert "enough for inference" in browser.outcome
    page.keyboard.press("Control+a")
    page.keyboard.type("112e9 Gb")
    page.keyboard.press("Enter")
    browser.sync()
    assert "could not be read" in browser.outcome and "b is a bit" in browser.outcome
    page.keyboard.press("Control+a")
    page.keyboard.type("112e9 B")
    page.keyboard.press("Enter")
    browser.sync()
    assert "Right." in browser.outcome
    assert page.evaluate("document.activeElement.tagName") == "INPUT", "the focus stays"
    sent = page.evaluate("window.saved")
    page.keyboard.press("Enter")
    assert page.evaluate("window.saved") == sent, "a settled answer is not sent twice"
    keep(page, "quiz_number")


@pytest.mark.browser
def test_script_orders_by_keyboard(open_card):
    browser = open_card()
    page = browser.page
    at = number_of(browser.card, "ordering")
    browser.go("ordering")
    asked = browser.card._quiz.asked[at]
    wanted = right_answer(asked)
    for place, entry in enumerate(wanted):
        item = page.locator(f'.zl-item[data-entry="{entry}"]')
        item.focus()
        for _ in range(len(wanted)):
            now = page.eval_on_selector_all(".zl-item", "ns => ns.map(n => +n.dataset.entry)")
            if now.index(entry) == place:
                break
            page.keyboard.press("ArrowUp")
            assert page.evaluate("+document.activeElement.dataset.entry") == entry
    browser.click("Check")
    browser.sync()
    assert "Right." in browser.outcome


@pytest.mark.browser
def test_script_orders_by_mouse_and_speaks_the_new_place(open_card):
    browser = open_card()
    page = browser.page
    browser.go("ordering")
    before = page.eval_on_selector_all(".zl-item", "ns => ns.map(n => +n.dataset.entry)")
    page.locator(".zl-item").nth(3).drag_to(page.locator(".zl-item").nth(0))
    after = page.eval_on_selector_all(".zl-item", "ns => ns.map(n => +n.dataset.entry)")
    assert after == [before[3], *before[:3]]
    assert "now 1 of 4" in page.locator("[aria-live=assertive]").inner_text()
    page.locator(".zl-item").nth(0).get_by_role("button", name="move down").click()
    again = page.eval_on_selector_all(".zl-item", "ns => ns.map(n => +n.dataset.entry)")
    assert again == [before[0], before[3], *before[1:3]]


@pytest.mark.browser
def test_script_lets_the_author_judge_a_short_answer(open_card, keep):
    browser = open_card()
    page = browser.page
    browser.go("short")
    page.locator("textarea").fill("It needs 200 GB on every GPU, so offload to the host.")
    browser.click("Check")
    browser.sync()
    assert "Compare your answer" in browser.outcome and "1.4 TB" in browser.outcome
    boxes = page.locator(".zl-outcome input[type=checkbox]")
    assert [boxes.nth(i).is_checked() for i in range(5)] == [True, True, False, False, False]
    keep(page, "quiz_rubric")
    for i in (2, 3, 4):
        boxes.nth(i).check()
    browser.click("Count the points")
    browser.sync()
    assert "Right." in browser.outcome


@pytest.mark.browser
def test_script_shows_the_answer_only_on_request(open_card):
    browser = open_card()
    page = browser.page
    browser.go("bug")
    assert page.get_by_role("button", name="Show the answer").count() == 0
    page.locator('.zl-line[data-entry="0"]').click()
    browser.click("Check")
    browser.sync()
    assert "line 5" not in browser.outcome.lower()
    browser.click("Show the answer")
    browser.sync()
    assert "line 5: if stage >= 1:" in browser.outcome


@pytest.mark.browser
def test_script_keeps_what_was_entered_when_one_goes_on(open_card):
    browser = open_card()
    page = browser.page
    browser.go("01-bytes-a-parameter")
    page.locator(".zl-number input").fill("12")
    browser.click("Next question")
    assert page.locator(".zl-meta").inner_text().startswith("Question 2 of 12")
    browser.click("Back")
    assert page.locator(".zl-number input").input_value() == "12"


@pytest.mark.browser
def test_script_fits_a_narrow_column_and_double_zoom(open_card, keep):
    browser = open_card(width=400)
    page = browser.page
    for name in ("bug", "ordering", "multiple", "numeric"):
        browser.go(name)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        keep(page, f"quiz_narrow_{name}")


@pytest.mark.browser
def test_keys_do_not_reach_the_notebook(open_card):
    browser = open_card()
    page = browser.page
    page.evaluate("document.addEventListener('keydown', () => { window.heard = true; })")
    browser.go("numeric")
    page.keyboard.type("4")
    page.keyboard.press("Enter")
    assert page.evaluate("window.heard") is None
