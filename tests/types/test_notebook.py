from knowgate.types import Answer, Decision, Neighbor, Passage, Question
from knowgate.types.markup import format_count, shorten

DECISION = Decision(True, 0.72, 0.5, "probe", "need 0.72 is above 0.50")
PASSAGE = Passage("p1", "<b>Lima</b> is the capital of Peru.", "Peru")
ANSWER = Answer(Question("Capital of Peru?"), "Lima", DECISION, (PASSAGE,))


def test_the_repr_of_a_decision_has_verdict_and_reason():
    assert repr(DECISION) == "<Decision: retrieve, need 0.72 is above 0.50; gate probe>"


def test_an_answer_is_one_line_without_its_passages():
    expected = "<Answer 'Lima' to 'Capital of Peru?': retrieve, 1 passage; need 0.72 is above 0.50>"
    assert repr(ANSWER) == expected


def test_an_answer_in_a_notebook_shows_its_passages_as_text():
    shown = ANSWER._repr_html_()
    assert "Capital of Peru?" in shown
    assert "Peru: &lt;b&gt;Lima&lt;/b&gt; is the capital of Peru." in shown
    assert "<b>" not in shown


def test_a_decision_in_a_notebook_shows_similar_logged_questions():
    near = Neighbor("Capital of <i>Chile</i>?", "known", 0.91)
    shown = Decision(False, 0.1, 0.5, "skr", "because", (near,))._repr_html_()
    assert "similar, known" in shown
    assert "Capital of &lt;i&gt;Chile&lt;/i&gt;? (0.91)" in shown


def test_long_texts_are_cut_to_one_line():
    assert shorten("a\nb  c", 10) == "a b c"
    assert shorten("abcdef", 4) == "abc…"


def test_a_count_of_one_has_no_plural():
    assert (format_count(1, "passage"), format_count(0, "passage")) == ("1 passage", "0 passages")
