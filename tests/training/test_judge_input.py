"""What a judge of answers cannot learn from, or be made of: each is said in a sentence."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from knowgate.data.runs.rows import GradedAnswer
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.gates import load_gate
from knowgate.gates.judges.causal_judge import CausalJudge, load_judge_base
from knowgate.training.examples import load_examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.answer_judge import fit_answer_judge
from knowgate.training.judges.trainable_models import NO_CHAT_TEMPLATE_NOTE
from knowgate.types import Completion, Reading
from tests.support.judge_data import planted, quick
from tests.support.planted_run import planted_rows, write_run
from tests.support.tiny_models import save_word_llama

SHORT = {"epochs": 1, "batch": 8}


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_word_llama(tmp_path_factory.mktemp("model"))


def with_drafts(examples, text):
    readings = [Reading(draft=Completion(text)) for _ in examples.readings]
    return replace(examples, table=replace(examples.table, readings=readings))


# --- answers --------------------------------------------------------------------------------------


def test_answers_that_are_all_empty_are_refused(base, tmp_path):
    with pytest.raises(BadInput, match=r"cannot learn from these answers\. Every answer is empty"):
        fit_answer_judge(with_drafts(planted(base, 60), "  "), work=tmp_path)


def test_an_llm_that_always_abstains_is_refused(base, tmp_path):
    with pytest.raises(BadInput, match=r"these answers. Every answer declines to answer \('I don't know"):
        fit_answer_judge(with_drafts(planted(base, 60), "I don't know."), work=tmp_path)


def test_the_question_alone_can_be_judged_whatever_the_answers(base, tmp_path):
    fitted = fit_answer_judge(with_drafts(planted(base, 60), ""), tokens=0, work=tmp_path, **SHORT)
    assert 0 <= fitted.raw([0])[0] <= 1


def test_some_empty_answers_do_no_harm(base, tmp_path):
    examples = planted(base, 60, by="draft")
    readings = [Reading(draft=Completion("")) if i % 3 else one for i, one in enumerate(examples.readings)]
    holed = replace(examples, table=replace(examples.table, readings=readings))
    assert 0 <= fit_answer_judge(holed, work=tmp_path, **SHORT).raw([1])[0] <= 1


def test_both_wants_open_answers(base, tmp_path):
    examples = planted(base, 60, by="draft")
    rows = [replace(row, open=None) for row in examples.rows]
    closed_book_only_cost = replace(examples, table=replace(examples.table, rows=rows))
    with pytest.raises(BadInput, match="both=True needs graded answers with passages, but no question has one"):
        fit_answer_judge(closed_book_only_cost, both=True, work=tmp_path)


# --- agreement ------------------------------------------------------------------------------------


def answered_twice(tmp_path, change):
    """A run whose open answers repeat the closed ones at even rows; `change` makes a row of it."""
    rows, states = planted_rows(60)
    made = []
    for i, row in enumerate(rows):
        opened = GradedAnswer(f" {row.closed.text.upper()}. " if i % 2 == 0 else "something else")
        made.append(change(i, replace(row, open=opened)))
    return write_run(tmp_path / "run", made, states)


def ungraded(i, row):
    return replace(row, closed=replace(row.closed, correct=None), benefit=None)


def test_agreement_needs_no_grades(tmp_path):
    examples = load_examples([answered_twice(tmp_path, ungraded)], target="agree")
    assert examples.needed.tolist() == [i % 2 == 1 for i in range(60)]


def test_no_answer_is_nothing_to_agree_on(tmp_path):
    def silent(i, row):
        text = ("", "I don't know.")[i % 4 == 0] if i < 8 else row.closed.text
        opened = row.open if i >= 8 else GradedAnswer(text)
        return replace(row, closed=replace(row.closed, text=text), open=opened)

    examples = load_examples([answered_twice(tmp_path, silent)], target="agree")
    assert examples.needed[:8].all()
    assert not examples.needed[8::2].any()


def test_rows_without_an_open_answer_are_left_out_of_agreement(tmp_path):
    run = answered_twice(tmp_path, lambda i, row: replace(row, open=None) if i >= 50 else row)
    assert len(load_examples([run], target="agree").rows) == 50


def test_agreement_without_any_open_answer_is_refused(tmp_path):
    run = answered_twice(tmp_path, lambda i, row: replace(row, open=None))
    with pytest.raises(BadInput, match="needs answers with passages, but no question has one"):
        load_examples([run], target="agree")


def test_the_card_says_what_agreement_means(base, tmp_path):
    examples = replace(planted(base, 60, by="draft"), target="agree")
    save_fitted(fit_answer_judge(examples, work=tmp_path / "w", **SHORT), examples, tmp_path / "gate")
    assert "the LLM gives another answer once it has passages" in (tmp_path / "gate" / "README.md").read_text()


# --- bases ----------------------------------------------------------------------------------------


def test_a_base_that_cannot_tell_the_labels_apart_is_refused(base):
    judge = CausalJudge(load_judge_base(f"hf:{base}"), ("Yesterday", "Nowhere"))  # both unknown to its tokenizer
    with pytest.raises(
        BadSetting,
        match=r"cannot be a judge\. Its tokenizer starts the labels Yesterday and Nowhere with the same token",
    ):
        _ = judge.label_tokens


def test_a_base_without_chat_template_is_asked_in_plain_text_and_the_card_says_so(tmp_path):
    folder = save_word_llama(tmp_path / "bare")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    fitted = fit_answer_judge(planted(folder, 60, by="draft"), work=tmp_path / "w", **SHORT)
    assert NO_CHAT_TEMPLATE_NOTE in fitted.notes


def test_an_adapter_of_another_base_is_refused(tmp_path):
    folder = save_word_llama(tmp_path / "base")
    examples = planted(folder, 60, by="draft")
    save_fitted(fit_answer_judge(examples, work=tmp_path / "w", **SHORT), examples, tmp_path / "gate")
    (tmp_path / "gate").rename(tmp_path / "moved")  # another folder: what was opened before is not handed out again
    save_word_llama(folder, seed=1)
    with pytest.raises(ArtifactError, match="Use the original weights, or fit the judge again"):
        load_gate(str(tmp_path / "moved")).score(examples.questions[:1], examples.readings[:1])


def test_a_judge_of_imported_answers_must_be_told_its_base(base, tmp_path):
    examples = planted(base, 60, by="draft")
    settings = {**examples.settings, "model": "recorded:my-llm"}
    imported = replace(examples, table=replace(examples.table, settings=settings))
    with pytest.raises(BadSetting, match=r"'recorded:my-llm' has no local weights to fine-tune\. Set `base`"):
        fit_answer_judge(imported, work=tmp_path)


# --- one-sided runs -------------------------------------------------------------------------------


def one_sided(tmp_path, text, correct=False):
    rows, states = planted_rows(60)
    made = [replace(row, closed=GradedAnswer(text, correct=correct), open=None, benefit=None) for row in rows]
    return write_run(tmp_path / "run", made, states)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "Every answer is empty. Label with a larger `max_tokens`"),
        ("I don't know.", r"Every answer declines to answer \('I don't know.'\). Label with prompts"),
        ("zzz", "at least 8 of each kind. Label more questions"),
    ],
)
def test_rows_that_are_all_wrong_say_why_where_it_is_plain(tmp_path, text, cause):
    with pytest.raises(BadInput, match=cause):
        load_examples([one_sided(tmp_path, text)], target="known")


def test_rows_that_are_all_right_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"there are 0 .* and 60 "):
        load_examples([one_sided(tmp_path, "a", correct=True)], target="known")
