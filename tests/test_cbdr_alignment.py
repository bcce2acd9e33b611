"""The benchmark of aligned rerankers chooses recipes on dev questions and records no texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks import cbdr_alignment
from benchmarks.cbdr_alignment import AlignmentPlan, choose_recipe, list_effects, select_relevance, write_questions
from knowgate.data.preferences import PreferenceFolder
from knowgate.types import Passage, Question
from tests.support.planted_preferences import SETTINGS, planted_preferences


def write_selection(folder: Path, chosen: float | None) -> None:
    folder.mkdir()
    selection = None if chosen is None else {"chosen": chosen}
    (folder / "reranker.json").write_text(json.dumps({"selection": selection}))


def test_the_recipe_with_the_best_dev_ranking_is_chosen_and_never_the_papers(tmp_path: Path):
    for recipe, value in (("checked", 0.6), ("gentle", 0.7), ("paper", None)):
        write_selection(tmp_path / f"benefit-{recipe}", value)  # "mixed" was not fitted
    assert choose_recipe(tmp_path, "benefit") == "gentle"
    write_selection(tmp_path / "benefit-mixed", 0.7)
    assert choose_recipe(tmp_path, "benefit") == "gentle"  # the first of equals


def test_every_step_reads_what_an_earlier_one_wrote(tmp_path: Path):
    steps = list(AlignmentPlan("hf:x", tmp_path, tmp_path, "minilm", 9).steps())
    assert len({step.name for step in steps}) == len(steps) == 5 + 1 + 10 + 8 + 1
    written = {"idx", "data"}
    for step in steps:
        values = [word.partition("=")[2] or word for word in step.words if str(tmp_path) in word]
        *inputs, out = [Path(value).name for value in values]
        assert set(inputs) <= written, step.name
        written.add(out)


def test_a_relevance_example_has_the_first_passages_with_and_without_the_answer():
    contexts = tuple(Passage(str(number), f"Paris {number}") for number in range(3))
    hits = [Passage(f"h{number}", f"Rome {number}") for number in range(9)]
    passages = select_relevance(Question("capital of France?", "q", ("Paris",), contexts=contexts), hits)
    assert [passage.id for passage in passages] == ["0", "1", *(f"h{number}" for number in range(7))]


def test_written_questions_have_the_candidates_as_contexts(tmp_path: Path):
    write_questions(tmp_path / "x" / "train.jsonl.gz", [Question("q?", "1", ("a",))], [[Passage("p", "text", "title")]])
    record = json.loads(gzip.decompress((tmp_path / "x" / "train.jsonl.gz").read_bytes()))
    assert record["contexts"] == [{"id": "p", "title": "title", "text": "text"}]


def test_effects_have_ids_and_numbers_only(tmp_path: Path):
    rows = planted_preferences(2)
    folder = PreferenceFolder(tmp_path / "pref-x")
    folder.start(dict(SETTINGS), {})
    folder.append(rows)
    effects = list(list_effects(folder.path))
    assert [effect["id"] for effect in effects] == [row.id for row in rows]
    written = json.dumps(effects)
    assert not any(row.question in written or row.candidates[0].text in written for row in rows)


def test_the_reference_recipe_is_that_of_the_paper():
    assert cbdr_alignment.RECIPES[cbdr_alignment.REFERENCE] == ("--checks", "0")
