"""Small LLMs are shown the sentences that a question is about, and quote them if they invent an answer."""

from __future__ import annotations

import pytest

from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import (
    AnswerPrompts,
    load_answer_prompts,
    quote_unless_grounded,
    select_sentences,
    split_sentences,
)
from knowgate.types import Passage, Question

CANTEEN = Passage(
    "canteen.md",
    "# Canteen\n\nThe canteen serves lunch from 11:45 to 13:30. A staff lunch costs 4.60 euro and includes soup. The "
    "cook is Dr. Marguerite Pym, who posts the menu.",
    "Canteen",
)
GARAGE = Passage("garage.md", "# Garage\n\nParking costs 3 euro.\n- Bicycles are free\n- Vans pay 9 euro", "Garage")


def test_sentences_are_split_without_headings_and_not_after_titles():
    assert split_sentences(CANTEEN.text)[-1] == "The cook is Dr. Marguerite Pym, who posts the menu."
    assert split_sentences(GARAGE.text) == ["Parking costs 3 euro.", "- Bicycles are free", "- Vans pay 9 euro"]
    assert split_sentences("食堂。午餐四元。") == ["食堂。", "午餐四元。"]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What does a staff lunch cost?", "A staff lunch costs 4.60 euro and includes soup."),
        ("Who is the cook?", "The cook is Dr. Marguerite Pym, who posts the menu."),
        ("When does the canteen serve lunch?", "The canteen serves lunch from 11:45 to 13:30."),
        ("How much do vans pay?", "- Vans pay 9 euro"),
    ],
)
def test_the_best_sentence_of_all_passages_is_selected(question, expected):
    (passage,) = select_sentences(question, [GARAGE, CANTEEN], 1)
    assert passage.text == expected


def test_sentences_keep_their_order_and_passages_without_one_are_dropped():
    selected = select_sentences("Which staff lunch includes soup, and who is the cook?", [GARAGE, CANTEEN], 2)
    assert [passage.id for passage in selected] == ["canteen.md"]
    assert selected[0].text.startswith("A staff lunch costs")
    assert select_sentences("Why?", [], 2) == []


@pytest.mark.parametrize(
    ("answer", "is_kept"),
    [
        ("A staff lunch costs 4.60 euros.", True),
        ("4.60 euro", True),
        ("It costs 12 euro.", False),  # a number that is not there
        ("What does a staff lunch cost?", False),  # the question again
        ("Lunch is a meal in the middle of the day.", False),
        ("", False),
    ],
)
def test_an_answer_that_is_not_in_the_passages_is_replaced_by_their_best_sentence(answer, is_kept):
    given = quote_unless_grounded("What does a staff lunch cost?", answer, [CANTEEN])
    assert given == (answer if is_kept else "A staff lunch costs 4.60 euro and includes soup.")


def test_nothing_is_quoted_from_a_passage_about_something_else():
    assert quote_unless_grounded("What is the capital of Japan?", "Tokyo", [CANTEEN, GARAGE]) == "Tokyo"


def test_only_the_embedded_llm_is_shown_sentences_and_its_closed_book_prompt_stays_the_same():
    embedded = FakeModel({}, name="smollm")
    prompts, plain = load_answer_prompts(model=embedded), AnswerPrompts()
    question = Question("Who is the cook?")
    assert (prompts.fingerprint, prompts.closed(question)) == (plain.fingerprint, plain.closed(question))
    assert prompts.open_book_fingerprint != plain.open_book_fingerprint
    assert "Marguerite" in prompts.open(question, [CANTEEN]).text
    assert "soup" in plain.open(question, [CANTEEN]).text
    assert load_answer_prompts(model=FakeModel()) == plain
    assert plain.check_open_answer(question, [CANTEEN], "invented") == "invented"
