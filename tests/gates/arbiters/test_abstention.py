"""Rules without training: an answer with passages that says it cannot tell gives way to the one from memory."""

import pytest

from knowgate.core.text import MAX_ANSWER_CHARS, cut_answer
from knowgate.errors import BadSetting
from knowgate.gates.arbiters import abstention, load_arbiter
from knowgate.gates.arbiters.abstention import RULES_ARBITER, RulesArbiter, answers_agree
from tests.support.pairs_by_hand import both


@pytest.mark.parametrize(
    "answer",
    [
        "Not mentioned.",
        "The passages do not mention who wrote it.",
        "There is no information about the director.",
        "I don't know",
        "None",
        "N/A",
        "文中未提及该信息。",
        "无法确定",
        "",
        " ... ",
    ],
)
def test_an_answer_that_says_it_cannot_tell_abstains(answer):
    assert RULES_ARBITER.abstains(answer)


@pytest.mark.parametrize(
    "answer", ["No", "Paris", "Nothing Else Matters", "The Unknown Soldier", "巴黎", "Not Nine O'Clock News"]
)
def test_an_answer_that_resembles_an_abstention_does_not_abstain(answer):
    assert not RULES_ARBITER.abstains(answer)


def test_phrases_after_the_window_do_not_count():
    assert not RULES_ARBITER.abstains("Edward Dmytryk, who was born in 1908, directed Mutiny, a film of the year 1952; of the "
                              "other film the director is not mentioned.")  # fmt: skip


def test_the_closed_book_answer_is_preferred_if_only_the_other_abstains():
    belief = RULES_ARBITER.estimate([both("Paris", "not mentioned")])[0]
    assert belief.prefers_closed
    assert belief.reason == "the answer with passages says it cannot tell"


@pytest.mark.parametrize(
    ("closed", "opened", "reason"),
    [
        ("Paris", "Rome", "it is replaced only if it alone says that it cannot tell"),
        ("I do not know.", "Rome", "it is replaced only if it alone says that it cannot tell"),
        ("unknown", "not mentioned", "it is replaced only if it alone says that it cannot tell"),
        ("", "no answer", "it is replaced only if it alone says that it cannot tell"),
    ],
)
def test_otherwise_the_answer_with_passages_is_kept_and_the_reason_is_true(closed, opened, reason):
    belief = RULES_ARBITER.estimate([both(closed, opened)])[0]
    assert not belief.prefers_closed
    assert belief.reason == reason


def test_custom_phrases_replace_the_packaged_ones(tmp_path):
    file = tmp_path / "phrases.txt"
    file.write_text("keine Angabe\n\n", encoding="utf-8")
    own = load_arbiter(f"rules:words={file}")
    assert own.estimate([both("Paris", "Keine Angabe.")])[0].prefers_closed
    assert not own.estimate([both("Paris", "not mentioned")])[0].prefers_closed
    assert own.fingerprint != RULES_ARBITER.fingerprint


def test_an_unreadable_phrase_file_is_reported(tmp_path):
    with pytest.raises(BadSetting, match="cannot read the abstention phrases in the file"):
        _ = RulesArbiter(words=str(tmp_path / "none.txt")).phrases


def test_a_file_without_a_phrase_is_rejected(tmp_path):
    file = tmp_path / "phrases.txt"
    file.write_text("\n...\n", encoding="utf-8")
    with pytest.raises(BadSetting, match="contains no abstention phrases"):
        _ = RulesArbiter(words=str(file)).phrases


def test_the_start_of_an_answer_is_streamed_once_it_does_not_abstain():
    assert not RULES_ARBITER.accepts_beginning("Paris is")
    assert RULES_ARBITER.accepts_beginning(
        "Paris is the capital of France and has been so for many hundred years, with breaks " * 2
    )
    assert not RULES_ARBITER.accepts_beginning(
        "The passages do not mention it. However, " + "there is more to say about it " * 5
    )


def test_of_a_beginning_only_the_window_is_read(monkeypatch):
    assert RULES_ARBITER.phrases  # reads them now
    read = []
    monkeypatch.setattr(abstention, "normalize", lambda text: read.append(text) or text)
    monkeypatch.setattr(abstention, "join_tokens", lambda text: read.append(text) or text)
    RULES_ARBITER.accepts_beginning("I don't know " + "\ufdfa" * 20_000)
    assert {len(text) for text in read} == {abstention.ABSTENTION_WINDOW}


def test_only_the_beginnings_of_very_long_answers_are_compared():
    """Comparing megabytes would hold up all requests of a server."""
    same = "x " * MAX_ANSWER_CHARS
    assert answers_agree(same + "a", same + "b")
    assert not answers_agree("y z " + same, "z y " + same)
    assert RULES_ARBITER.abstains("." * MAX_ANSWER_CHARS + "Paris")  # nothing but dots where it is read


def test_characters_that_become_many_letters_do_not_lengthen_what_is_read_of_an_answer():
    assert cut_answer("Paris") == "Paris"
    assert len(cut_answer("\ufdfa" * MAX_ANSWER_CHARS)) == MAX_ANSWER_CHARS  # each becomes 18 characters
    assert cut_answer("é" * MAX_ANSWER_CHARS) == "é" * MAX_ANSWER_CHARS
