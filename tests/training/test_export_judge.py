"""A judge written as GGUF: the gate says nearly what it said, and what cannot be written is refused in a sentence."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from knowgate.core.schema import read_record
from knowgate.errors import BadSetting, ModelError
from knowgate.gates import load_gate
from knowgate.gates.judges.causal_judge import GgufOptions, load_llama_judge
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.answer_judge import AnswerTask, make_answer_training, train_answer_judge
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.training.judges.gguf_export import ExportedJudge, export_judge
from tests.support.judge_data import planted, quick, scored_elsewhere
from tests.support.tiny_models import save_spoken_llama, save_word_llama

HOW = replace(make_answer_training(2, 8, 1e-2), rank=8)
WITHOUT_TORCH = """
import sys
from knowgate.gates import load_gate
from knowgate.types import Completion, Question, Reading
load_gate(sys.argv[1]).score([Question("x a?")], [Reading(draft=Completion("b"))])
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


@dataclass(frozen=True)
class Made:
    gate: Path
    examples: object
    out: Path
    told: ExportedJudge


@pytest.fixture(scope="module", autouse=True)
def _quick():
    pytest.importorskip("xllamacpp")
    with quick():
        yield


def fitted(folder, base, **crewed):
    examples = planted(base, 60, by="draft")
    judge = train_answer_judge(
        AnswerTask("judge", 16), examples, plan_ensemble(examples.split, HOW, **crewed), work=folder / "work"
    )
    save_fitted(judge, examples, folder / "gate")
    return examples


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    examples = fitted(folder, save_spoken_llama(folder / "model"), seeds=2)
    told = export_judge(folder / "gate", folder / "fast", kind="f16")
    return Made(folder / "gate", examples, folder / "fast", told)


def test_it_scores_as_before_up_to_the_numbers_it_is_written_in(made):
    rows = made.examples.questions[:20], made.examples.readings[:20]
    before = load_gate(str(made.gate)).raw_scores(*rows)
    assert np.ptp(before) > 0.1
    assert load_gate(str(made.out)).raw_scores(*rows) == pytest.approx(before, abs=0.02)


def test_it_is_told_how_far_the_judge_moved(made):
    assert made.told.max_deviation < 0.02


def test_every_training_has_a_file_of_its_own(made):
    assert sorted(path.parent.name for path in made.out.glob("*/judge.gguf")) == ["adapter", "adapter-1"]
    assert not list(made.out.glob("adapter*/*.safetensors"))


def test_another_process_gives_the_same_scores(made):
    places = list(range(6))
    rows = made.examples.questions[:6], made.examples.readings[:6]
    here = load_gate(str(made.out)).score(*rows)
    # what llama.cpp kept of the prompt before decides how it adds up the next
    assert scored_elsewhere(made.out, made.examples, places) == pytest.approx(here, abs=1e-4)


def test_it_runs_without_torch(made):
    code = [sys.executable, "-c", WITHOUT_TORCH, str(made.out)]
    assert subprocess.run(code, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_threshold_and_calibration_are_kept_and_the_card_says_what_it_is(made):
    old, new = (json.loads((folder / "gate.json").read_text()) for folder in (made.gate, made.out))
    assert (new["threshold"], new["calibration"]) == (old["threshold"], old["calibration"])
    assert "The judge was exported as GGUF (f16)" in (made.out / "README.md").read_text()


def test_a_llama_cpp_that_counts_otherwise_is_found_out(made):
    options = load_gate(str(made.out)).artifact.options["gguf"]
    wrong = [{**check, "known": 1 - check["known"]} for check in options["checks"]]
    changed = read_record(GgufOptions, {**options, "checks": wrong}, "options.gguf", ignore_unknown=True)
    with pytest.raises(ModelError, match="deviates from the original"):
        load_llama_judge((made.out / "adapter",), ("other",), changed)


def test_a_gate_without_a_judge_is_refused(tmp_path, packaged_probe):
    with pytest.raises(BadSetting, match="contains no causal language model"):
        export_judge(packaged_probe, tmp_path / "out")


def test_a_judge_that_is_gguf_already_is_refused(made, tmp_path):
    with pytest.raises(BadSetting, match="contains no causal language model"):
        export_judge(made.out, tmp_path / "out")


def test_a_gate_does_not_take_its_own_place(made):
    with pytest.raises(BadSetting, match="is the folder of the gate itself"):
        export_judge(made.gate, made.gate)


def test_a_tokenizer_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    fitted(tmp_path, save_word_llama(tmp_path / "model"))
    with pytest.raises(BadSetting, match="tokenizer of this base"):
        export_judge(tmp_path / "gate", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.fixture
def packaged_probe():
    from knowgate.gates import __file__ as here

    return next((Path(here).parent / "packaged").rglob("gate.json")).parent
