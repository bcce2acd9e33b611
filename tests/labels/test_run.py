"""A label run with the fake model: rows, resumption, failed questions and rejected settings."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.rows import row_from_json, row_to_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, KnowgateError, ServerError
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import Labeler
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.options import LabelOptions
from knowgate.labels.run import fingerprint_questions, run_labeling
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Passage, Question
from tests.support.processes import PATIENCE, child, until

TABLE = {
    "capital of France": {"closed": "Paris", "open": "Paris", "samples": ["Paris", "Paris", "Lyon", "Paris"]},
    "capital of Peru": {"closed": "Cusco", "open": "Lima", "samples": ["Cusco", "Lima", "Quito", "Bogota"]},
}
QUESTIONS = [
    Question("What is the capital of France?", id="fr", answers=("Paris",), contexts=(Passage("p1", "Paris it is."),)),
    Question("What is the capital of Peru?", id="pe", answers=("Lima",), contexts=(Passage("p2", "Lima it is."),)),
]


def labeler(model=None, **plan):
    settings = {"samples": 4, "layers": (1, 2), **plan}
    return Labeler(model or FakeModel(TABLE), StringGrader(), LabelOptions(**settings))


def many(n):
    return [Question(f"Question number {i}?", id=str(i), answers=("x",)) for i in range(n)]


def run(tmp_path, questions=QUESTIONS, made=None, **options):
    folder = RunFolder(tmp_path / "run")
    run_labeling(folder, questions, made or labeler(), data="jsonl:test", **options)
    return folder


def test_mastery_certainty_effect_and_benefit_of_known_answers(tmp_path):
    rows = {row.id: row for row in run(tmp_path).rows()}
    assert rows["fr"].closed.mastery == 0.75
    assert rows["pe"].closed.mastery == 0.25
    assert rows["pe"].closed.certainty == pytest.approx(0.0)
    assert rows["pe"].closed.correct is False
    assert rows["pe"].open.correct is True
    assert (rows["fr"].benefit, rows["pe"].benefit) == (0, 1)


def test_rows_are_unchanged_by_a_json_round_trip(tmp_path):
    for row in run(tmp_path).rows():
        assert row_from_json(json.loads(json.dumps(row_to_json(row))), "here") == row


def test_hidden_states_belong_to_their_rows(tmp_path):
    folder = run(tmp_path, many(9), runner=LocalRunner(first=2, largest=4))
    rows = list(folder.rows())
    model = FakeModel(TABLE)
    prompts = labeler().prompts
    from knowgate.types import SignalRequest

    states = model.read(
        [prompts.closed(q) for q in many(9)], SignalRequest(draft_tokens=32, layers=(2,), after_draft=True)
    )
    np.testing.assert_allclose(folder.vectors(rows, "before.2"), [s.hidden[2] for s in states], atol=1e-2)
    np.testing.assert_allclose(folder.vectors(rows[::-1], "after.2")[0], states[-1].hidden_after[2], atol=1e-2)
    assert folder.vector_names() == ["after.1", "after.2", "before.1", "before.2"]


def test_without_gold_answers_there_is_certainty_but_no_mastery(tmp_path):
    questions = [Question("What is the capital of France?", id="fr")]
    row = next(run(tmp_path, questions).rows())
    assert row.closed.mastery is None
    assert row.closed.correct is None
    assert row.closed.certainty is not None


def test_a_finished_run_is_not_changed(tmp_path):
    folder = run(tmp_path)
    before = (folder.path / "labels.jsonl").read_text()
    run(tmp_path)
    assert (folder.path / "labels.jsonl").read_text() == before


class Failing(FakeModel):
    """Cannot answer questions that hold 'bad'."""

    error = BadInput("too long")

    def read(self, prompts, want):
        if any("bad" in prompt.text for prompt in prompts):
            raise self.error
        return super().read(prompts, want)


def test_a_failed_question_is_a_row_with_its_error(tmp_path):
    questions = [*many(3), Question("A bad one?", id="bad", answers=("x",)), Question("Good?", id="g", answers=("x",))]
    folder = run(tmp_path, questions, labeler(Failing(TABLE)))
    rows = {row.id: row for row in folder.rows()}
    assert rows["bad"].error == "too long"
    assert [row.error for row in rows.values()].count(None) == 4
    assert folder.manifest()["totals"]["failed"] == 1
    states = folder.vectors([rows["g"]], "before.1")
    assert states.shape[0] == 1


def test_failed_rows_can_be_labeled_again(tmp_path):
    questions = [Question("A bad one?", id="bad", answers=("x",))]
    folder = run(tmp_path, questions, labeler(Failing(TABLE)))
    assert folder.drop_failed() == 1
    run(tmp_path, questions, labeler())
    assert [row.error for row in folder.rows()] == [None]


def test_a_server_that_is_down_stops_the_run_instead_of_failing_every_question(tmp_path):
    class Down(Failing):
        error = ServerError("the server is down")

    with pytest.raises(ServerError, match="down"):
        run(tmp_path, [Question("bad 1", id="1"), Question("bad 2", id="2")], labeler(Down(TABLE)))
    assert list(RunFolder(tmp_path / "run").rows()) == []


def test_other_settings_are_rejected_with_the_difference(tmp_path):
    run(tmp_path)
    with pytest.raises(BadSetting, match="samples was 4, now 5"):
        run(tmp_path, made=labeler(samples=5))


def test_sampling_options_are_settings_of_the_run(tmp_path):
    run(tmp_path, made=labeler(temperature=0.6, top_p=0.9, top_k=50))
    settings = RunFolder(tmp_path / "run").settings()
    assert (settings["temperature"], settings["top_p"], settings["top_k"]) == (0.6, 0.9, 50)
    with pytest.raises(BadSetting, match=r"top_p was 0\.9, now 0\.8"):
        run(tmp_path, made=labeler(temperature=0.6, top_p=0.8, top_k=50))


def test_untruncated_sampling_adds_no_settings(tmp_path):
    assert not {"top_p", "top_k", "sampling"} & set(run(tmp_path).settings())


def test_other_data_is_rejected(tmp_path):
    run(tmp_path)
    with pytest.raises(BadSetting, match="questions was 2, now 1"):
        run(tmp_path, QUESTIONS[:1])


def test_an_incomplete_last_line_is_removed_and_labeled_again(tmp_path):
    folder = run(tmp_path, many(6))
    file = folder.path / "labels.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) - 20])
    assert len(list(folder.rows())) == 5
    run(tmp_path, many(6))
    assert sorted(row.id for row in folder.rows()) == [str(i) for i in range(6)]


def test_a_run_of_another_version_is_rejected(tmp_path):
    folder = run(tmp_path)
    manifest = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(ArtifactError, match="another version of knowgate\\. It has format 99"):
        list(folder.rows())


def test_a_folder_with_other_content_is_rejected(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    with pytest.raises(BadSetting, match="other files and is not a label run"):
        run(tmp_path)


def test_a_full_disk_is_reported_and_finished_rows_stay(tmp_path, monkeypatch):
    folder = run(tmp_path, many(2))
    monkeypatch.setattr(RunFolder, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    (folder.path / "run.json").write_text((folder.path / "run.json").read_text())
    file = folder.path / "labels.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(KnowgateError, match=r"No space left on device\. Finished rows are saved"):
        run(tmp_path, many(2))
    assert len(list(folder.rows())) == 1


def test_two_processes_cannot_write_the_same_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.exclusive(), pytest.raises(BadSetting, match="another process is writing"):
        run(tmp_path)


def test_passages_beyond_the_context_window_are_dropped_and_counted(tmp_path):
    class Small(FakeModel):
        def fits(self, prompts, max_tokens):
            return [len(prompt.text) < 400 for prompt in prompts]

    long = tuple(Passage(str(i), f"passage {i} " + "word " * 40) for i in range(3))
    row = next(run(tmp_path, [Question("Why?", id="w", contexts=long)], labeler(Small(TABLE))).rows())
    assert [passage.id for passage in row.passages] == ["0"]
    assert row.cut == 2


def test_the_masked_answer_is_recorded_on_request(tmp_path):
    rows = list(run(tmp_path, made=labeler(mask=True)).rows())
    assert all(row.mask is not None for row in rows)
    assert all(row.mask.samples == () for row in rows)


def test_masked_answers_are_sampled_on_request(tmp_path):
    rows = list(run(tmp_path, made=labeler(mask=True, mask_samples=3)).rows())
    assert all(len(row.mask.samples) == 3 and row.mask.mastery is not None for row in rows)


def test_throughput_is_recorded_in_the_manifest(tmp_path):
    totals = run(tmp_path).manifest()["totals"]
    assert totals["rows"] == 2
    assert totals["tokens"] > 0
    assert totals["questions_per_second"] > 0


HALTING = """
import sys
from pathlib import Path
from knowgate.labels.grading import StringGrader
from knowgate.data.runs.folder import RunFolder
from knowgate.labels.labeler import Labeler
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.options import LabelOptions
from knowgate.labels.run import run_labeling
from knowgate.models.fake import FakeModel
from knowgate.types import Question

class Halting(FakeModel):
    calls = 0

    def read(self, prompts, want):
        self.calls += 1
        if self.calls > 5:
            sys.stdin.readline()  # until it is killed, or at once where there is nothing to read
        return super().read(prompts, want)

questions = [Question(f"Question number {i}?", id=str(i), answers=("x",)) for i in range(40)]
labeler = Labeler(Halting({}), StringGrader(), LabelOptions(samples=2, layers=(1,)))
runner = LocalRunner(first=2, largest=2)
run_labeling(RunFolder(Path(sys.argv[1])), questions, labeler, data="jsonl:test", runner=runner)
"""


def test_a_killed_run_continues_without_lost_or_duplicate_rows(tmp_path):
    target = tmp_path / "run"
    command = [sys.executable, "-c", HALTING, str(target)]
    for _ in range(2):
        enough = _size(target) + 500
        with child(command, stdin=subprocess.PIPE) as started:
            until(lambda enough=enough: _size(target) > enough, started)
    with child(command, stdin=subprocess.DEVNULL) as last:
        assert last.wait(PATIENCE) == 0
    rows = list(RunFolder(target).rows())
    assert sorted(int(row.id) for row in rows) == list(range(40))
    assert RunFolder(target).vectors(rows, "before.1").shape[0] == 40


def _size(target):
    file = target / "labels.jsonl"
    return file.stat().st_size if file.is_file() else 0


def test_memory_does_not_grow_with_the_number_of_questions(tmp_path):
    import tracemalloc

    def peak(n):
        tracemalloc.start()
        run(tmp_path / str(n), many(n), runner=LocalRunner(first=8, largest=8))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small, large = peak(20), peak(200)
    assert large < 2.5 * small


class OnePassageIndex:
    """A retriever that has one passage."""

    name, fingerprint = "bm25", "index-1"

    def search(self, queries, k):
        return [[Passage("p", "Lima it is.")] for _ in queries]


def from_index(**plan):
    return Labeler(FakeModel(TABLE), StringGrader(), LabelOptions(samples=0, **plan), retriever=OnePassageIndex())


def test_a_run_records_k_and_the_prompts_of_passages(tmp_path):
    settings = run(tmp_path, made=from_index()).manifest()["settings"]
    assert settings["k"] == 3
    assert settings["open_prompts"] == AnswerPrompts().open_book_fingerprint
    assert run(tmp_path / "own", made=labeler()).manifest()["settings"]["k"] is None  # all of the data's own
    closed = run(tmp_path / "closed", made=from_index(closed_book=True)).manifest()["settings"]
    assert "open_prompts" not in closed


def test_a_run_started_by_an_older_version_continues(tmp_path):
    folder = run(tmp_path, QUESTIONS[:1], from_index())
    manifest = folder.manifest()
    del manifest["settings"]["open_prompts"]
    settings = {**manifest["settings"], "k": None, "questions": 2, "data_fingerprint": fingerprint_questions(QUESTIONS)}
    (folder.path / "run.json").write_text(json.dumps({**manifest, "settings": settings}))
    assert len(list(run(tmp_path, made=from_index()).rows())) == 2
    with pytest.raises(BadSetting, match="k was None, now 5"):
        run(tmp_path, made=from_index(k=5))


BY_WORD = {"book": Passage("book", "Ada wrote it.", score=1.0), "Ada": Passage("ada", "Ada: Turin.", score=2.0)}


class Chain:
    """Who the author is must be found before their town is: each passage is found by a word of its own."""

    name, fingerprint = "bm25", "chain"

    def search(self, queries, k):
        return [[found for word, found in BY_WORD.items() if word in query][:k] for query in queries]


HOPS = {"Where does": {"closed": "?", "open": "Ada", "when": "wrote"}, "Ada: Turin.": {"closed": "Turin"}}
TOWN = Question("Where does the author of the book live?", id="town", answers=("Turin",))
PLAIN = Question("Where does the book lie?", id="lies", answers=("Ada",))


def in_rounds(tmp_path, questions, **plan):
    made = Labeler(FakeModel(HOPS), StringGrader(), LabelOptions(samples=0, iterative=True, **plan), retriever=Chain())
    return {row.id: row for row in run(tmp_path, questions, made).rows()}


def test_each_round_searches_with_the_previous_answer(tmp_path):
    row = in_rounds(tmp_path, [TOWN, PLAIN])["town"]
    assert (row.open.text, row.open.correct) == ("Ada", False)
    assert (row.iterative.text, row.iterative.correct, row.rounds) == ("Turin", True, 3)
    assert [passage.id for passage in row.passages] == ["book"]  # those of the one round, as ever


def test_rounds_end_if_no_new_passage_is_found(tmp_path):
    made = Labeler(
        FakeModel(HOPS), StringGrader(), LabelOptions(samples=0, iterative=True), retriever=OnePassageIndex()
    )
    (row,) = run(tmp_path, [TOWN], made).rows()
    assert (row.rounds, row.iterative.text) == (2, row.open.text)


def test_iterative_answers_need_an_index():
    with pytest.raises(BadSetting, match="Set `index`"):
        Labeler(FakeModel(), StringGrader(), LabelOptions(iterative=True))
    with pytest.raises(BadSetting, match="leave `closed_book` out"):
        Labeler(
            FakeModel(), StringGrader(), LabelOptions(iterative=True, closed_book=True), retriever=OnePassageIndex()
        )


def test_a_run_killed_while_writing_its_manifest_starts_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.abc.part").write_text("half", encoding="utf-8")
    assert run(tmp_path).done()
    assert not (tmp_path / "run" / ".run.json.abc.part").exists()


def test_failed_rows_are_retried_after_an_incomplete_last_line(tmp_path):
    folder = run(tmp_path)
    whole = list(folder.done())
    with (folder.path / "labels.jsonl").open("ab") as file:
        file.write(b'{"id": "torn')
    run(tmp_path, made=labeler(retry_failed=True))
    assert list(folder.done()) == whole


def test_a_file_at_the_path_of_the_run_is_rejected(tmp_path):
    (tmp_path / "run").write_text("mine", encoding="utf-8")
    with pytest.raises(BadSetting, match=r"is a file, not a folder\. Choose another"):
        run(tmp_path)
