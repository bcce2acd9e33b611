"""A first run from end to end, with an LLM that answers from a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation.first_run.gate_selection import ALWAYS_RETRIEVE_GATE
from knowgate.evaluation.first_run.labeling import read_rounds
from knowgate.evaluation.first_run.runner import FirstRunResult
from knowgate.gates.artifacts.gate_folder import read_artifact
from knowgate.models.fake import FakeModel
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.settings import PipelineOptions, load_settings
from tests.evaluation.first_run.conftest import Counted, N, World, asked, make_world, table
from tests.support.params import also_slow


@dataclass(frozen=True)
class Whole:
    """A first run with a hundred questions, of which a gate is learnt, too."""

    world: World
    made: FirstRunResult
    settings: PipelineOptions


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("KNOWGATE_CACHE", str(folder / "cache"))
        world = make_world(folder)
        yield Whole(world, world.run(count=N, max_loss=0.05), load_settings())


def test_a_gate_that_is_proven_is_written_where_ask_reads_it(whole: Whole):
    settings = whole.settings
    assert (settings.gate, settings.docs.name if settings.docs else "") == ("logprob:min", "docs")
    assert settings.threshold == pytest.approx(whole.made.choice.threshold)
    assert settings.arbiter == "none"  # the guarantee was shown without one
    assert "loses at most 5 %" in whole.made.choice.guarantee


def test_the_gate_skips_what_the_llm_knows_and_loses_nothing_on_questions_that_had_no_say(whole: Whole):
    assert "20 with the gate, which skips 7 searches; 20 with retrieval for each, 7 from memory" in whole.made.verdict


def test_a_learned_gate_that_thirty_questions_cannot_prove_is_not_used_and_that_is_said(whole: Whole):
    said = " ".join(whole.made.choice.explanations)
    assert "30 questions are too few to prove, with 97.5 % confidence, that skipping loses at most" in said


def test_where_two_gates_compete_each_is_held_to_half_the_chance_of_being_wrong(whole: Whole):
    assert "with 97.5 % confidence" in whole.made.choice.guarantee


def test_where_one_gate_is_there_alone_it_is_held_to_the_whole(world: World):
    assert "with 95 % confidence" in world.run().choice.guarantee


def test_the_page_recommends_what_was_proven_though_twenty_questions_alone_would_not(whole: Whole):
    page = whole.made.page.read_text(encoding="utf-8")
    assert "Use &#x27;logprob:min (chosen)&#x27; at" in page or "Use 'logprob:min (chosen)' at" in page
    assert "loses at most 5 % of the answers" in page


def test_no_question_is_in_two_parts_and_all_are_labeled(whole: Whole):
    rows = [row.id for run in whole.world.runs() for row in RunFolder(run).rows()]
    assert len(rows) == len(set(rows)) == N


def test_an_unproven_gate_is_not_used_silently(world: World, text_only: Callable[[], FakeModel]):
    made = world.run(text_only())
    assert load_settings().gate == ALWAYS_RETRIEVE_GATE
    assert "gives no log-probabilities" in " ".join(made.choice.explanations)


def test_three_questions_are_measured_on_and_prove_nothing(world: World):
    made = world.run(count=3)
    assert (made.choice.gate, load_settings().gate) == (ALWAYS_RETRIEVE_GATE, ALWAYS_RETRIEVE_GATE)
    assert "at most 10 % of the answers. That takes 29." in made.choice.explanations[0]
    assert made.page.is_file()


def test_questions_about_something_else_are_said_to_find_nothing(world: World):
    (world.folder / "odd.txt").write_text("Quo vadis?\nCui bono?", encoding="utf-8")
    with pytest.raises(BadInput, match=r"no passage was found for any question.*knowgate report"):
        world.run(questions="odd.txt")


def test_a_search_endpoint_without_questions_is_refused_with_what_to_type(world: World):
    with pytest.raises(BadSetting, match=r"does not list its passages.*`questions`"):
        world.run(docs="", index="http://127.0.0.1:9/search", questions="")


# --- with a gate that comes with knowgate ---------------------------------------------------------


def test_a_packaged_gate_that_is_proven_is_kept_with_its_threshold_and_used(world: World, packaged: Path):
    made = world.run()
    settings = load_settings()
    assert (settings.gate, settings.threshold) == ("knowgate-start/packaged-gate", None)
    assert "loses at most 10 % of the answers" in made.choice.guarantee
    assert "Chosen: the gate that comes with knowgate for this LLM." in made.choice.explanations[0]
    assert read_artifact(settings.gate).manifest["threshold"] < 0.5  # its own is 0.5, and the folder it came from...
    assert read_artifact(packaged).manifest["threshold"] == 0.5  # ... stays as it was
    assert "Use &#x27;packaged-gate&#x27; at" in made.page.read_text(encoding="utf-8")
    rag = build_pipeline(settings, model=Counted(table()))
    assert [decision.retrieve for decision in rag.decide_many([asked(3), asked(4)])] == [False, True]


def test_a_packaged_gate_that_is_not_proven_is_named_in_a_way_that_travels(world: World, packaged: Path):
    world.run(count=25)  # five of them are kept back; it takes 29
    text = (world.folder / "knowgate.toml").read_text(encoding="utf-8")
    assert '# to try: gate = "default"' in text
    assert str(world.folder) not in text


# --- without gold answers -------------------------------------------------------------------------


def test_without_gold_answers_what_is_said_with_passages_is_taken_for_right(world: World):
    made = world.run(questions="q.txt")
    rows = [row for run in world.runs() if run.parent.name == "agreed" for row in RunFolder(run).rows()]
    known = sum(int(row.question.rstrip("?").rpartition("n")[2]) % 3 == 0 for row in rows)
    assert {row.grader for row in rows} == {"agreement"}
    assert sum(bool(row.closed and row.closed.correct) for row in rows) == known  # every third lamp
    assert all(row.open is not None and row.open.correct for row in rows)
    assert "Accuracy means agreement here" in made.caveats[0]
    assert "Accuracy means agreement here" in made.page.read_text(encoding="utf-8")


# --- synthetic questions --------------------------------------------------------------------------


def test_written_questions_are_marked_synthetic_everywhere(world: World):
    made = world.run(questions="", count=N)
    run = RunFolder(world.runs()[0])
    assert run.settings()["synthetic"] == run.settings()["questions"]
    assert all(row.meta["synthetic"] is True for row in run.rows())
    gate = read_artifact("knowgate-start/learnt-gate")
    assert gate.manifest["synthetic"] == 50
    assert "**Synthetic: an LLM wrote 50 of 50 questions" in (gate.path / "README.md").read_text(encoding="utf-8")
    assert 'class="caution"' in made.page.read_text(encoding="utf-8")
    assert "Synthetic" in (world.folder / "knowgate.toml").read_text(encoding="utf-8")
    assert json.loads((made.page.parent / "summary.json").read_text())["synthetic"] == 20
    assert "Synthetic" in made.choice.guarantee


def test_an_llm_that_writes_no_question_of_use_is_said_so_with_what_to_type(world: World):
    with pytest.raises(BadInput, match=r"wrote only 0 usable questions.*`writer`.*`questions`"):
        world.run(Counted({}), questions="")


def test_more_questions_are_written_where_more_are_wanted_and_none_twice(world: World):
    first = Counted(table())
    world.run(first, questions="", count=40)
    second = Counted(table())
    world.run(second, questions="", count=60)
    assert first.written + second.written <= N
    written = next((world.folder / "knowgate-start" / "written").rglob("written.jsonl"))
    rows = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) >= 60


# --- stopping and going on ------------------------------------------------------------------------


@pytest.mark.parametrize("dies_at", [30, also_slow(60), also_slow(90), 170])
def test_interrupted_anywhere_the_same_call_continues_to_the_same_end(world: World, dies_at: int):
    with pytest.raises(KeyboardInterrupt):
        world.run(Counted(table(), dies_at=dies_at), questions="")
    again = Counted(table())
    made = world.run(again, questions="")
    rows = [row.id for run in world.runs() for row in RunFolder(run).rows()]
    assert len(rows) == len(set(rows)) == 60
    assert made.choice.gate == "logprob:min"
    fresh = Counted(table())
    assert world.run(fresh, questions="", out=Path("other"), config=Path("other.toml")).choice == made.choice
    assert again.read_prompts < fresh.read_prompts


def test_what_is_done_is_not_done_again(world: World):
    world.run()
    again = Counted(table())
    made = world.run(again)
    assert again.read_prompts == 0
    assert world.heard.lines.count("Measuring on the held-out questions.") == 1
    assert made.choice.gate == "logprob:min"


def test_a_report_that_somebody_deleted_is_written_again(world: World):
    page = world.run().page
    page.unlink()
    assert world.run().page.is_file()


def test_who_wants_more_questions_later_finds_the_earlier_ones_where_they_were(world: World):
    world.run(count=30)
    folder = world.runs()[0].parent
    before = read_rounds(folder).rounds
    again = Counted(table())
    world.run(again, count=60)
    assert read_rounds(folder).rounds[: len(before)] == before
    assert again.read_prompts == 2 * 30  # the other thirty, both ways


def test_fewer_questions_later_use_what_is_labeled(world: World):
    world.run()
    again = Counted(table())
    assert world.run(again, count=30).choice.gate == "logprob:min"
    assert again.read_prompts == 0


def test_another_llm_is_labeled_anew_and_the_first_ones_labels_stay(world: World):
    world.run()
    before = world.runs()
    world.run(Counted({**table(), asked(0): "green"}))
    assert set(before) < set(world.runs())


def test_documents_that_changed_are_noticed(world: World):
    world.run()
    (world.folder / "docs" / "new.txt").write_text("Lamp number n1000 is in the yard.", encoding="utf-8")
    again = Counted(table())
    world.run(again)
    assert again.read_prompts == 2 * 60


# --- settings -------------------------------------------------------------------------------------


def test_a_settings_file_of_somebody_else_stays_as_it_is(world: World):
    own = world.folder / "knowgate.toml"
    own.write_text('gate = "never"\n', encoding="utf-8")
    made = world.run(count=3)
    assert own.read_text(encoding="utf-8") == 'gate = "never"\n'
    assert load_settings(made.config).gate == ALWAYS_RETRIEVE_GATE
    assert any("stays as it is" in line for line in world.heard.lines)


def test_its_own_settings_file_is_brought_up_to_date_unless_somebody_changed_it(world: World):
    first = world.run(count=3)
    assert world.run().config == first.config
    assert load_settings().gate == "logprob:min"
    first.config.write_text('gate = "never"\n', encoding="utf-8")
    assert world.run().config != first.config
