"""One small artefact of every fitted gate, all of one fake model and one label run; the kbm judge is a tiny Llama.

How well they decide is not asked here: each is fitted on a few questions, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from knowgate.data.runs.folder import RunFolder
from knowgate.gates import load_gate
from knowgate.gates.fitted_gate import FittedGate
from knowgate.labels.grading import StringGrader
from knowgate.labels.labeler import Labeler
from knowgate.labels.options import LabelOptions
from knowgate.labels.run import run_labeling
from knowgate.models.fake import FakeModel
from knowgate.training.adaptive import fit_adaptive
from knowgate.training.examples import Examples, load_examples
from knowgate.training.fit_function import FitResult
from knowgate.training.fusion import fit_fusion
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.answer_judge import AnswerTask, train_answer_judge
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.training.judges.gain import fit_gain
from knowgate.training.judges.ik import fit_ik_text
from knowgate.training.judges.kbm import fit_kbm
from knowgate.training.policy.folder import make_constant_result
from knowgate.training.probe import fit_probe
from knowgate.training.question import fit_question
from knowgate.training.stack import stack_judges
from knowgate.training.uar import fit_uar_heads
from knowgate.types import Gate, Passage, Question
from tests.support.hash_embedder import HashEmbedder
from tests.support.judge_data import QUICK, quick
from tests.support.tiny_models import save_word_llama

PASSAGE = Passage("p", "It is right.")
FACTS = [Question(f"fact {i:03d}?", id=str(i), answers=("right",), contexts=(PASSAGE,)) for i in range(90)]
CRITERIA = {
    name: [
        Question(f"{name} {i:02d}?", id=f"{name}{i}", meta={"need_retrieval_by_criterion": i % 2 == 0})
        for i in range(40)
    ]
    for name in ("intent", "knowledge", "time")
}
TABLE = {
    **{q.text: {"closed": "right" if i % 3 else "wrong", "known": bool(i % 3)} for i, q in enumerate(FACTS)},
    **{q.text: {"open": "right" if i % 2 else "wrong"} for i, q in enumerate(FACTS) if i % 3 == 0},
}
MODEL = FakeModel(TABLE)
Fit = Callable[[Examples, Path], FitResult]
FITS: dict[str, Fit] = {
    "probe": lambda examples, work: fit_probe(examples, kind="linear"),
    "fusion": lambda examples, work: fit_fusion(examples),
    "uar": lambda examples, work: fit_uar_heads(examples, MODEL, CRITERIA),
    "adaptive": lambda examples, work: fit_adaptive(examples, embedder=HashEmbedder()),
    "constant": lambda examples, work: make_constant_result(),
    "question": lambda examples, work: fit_question(examples),
    "ik": lambda examples, work: fit_ik_text(examples, embedder=HashEmbedder()),
    "judge": lambda examples, work: train_answer_judge(
        AnswerTask("judge", 16, f"hf:{save_word_llama(work / 'llama')}"),
        examples,
        plan_ensemble(examples.split, replace(QUICK, epochs=1), seeds=2),
        work=work / "judging",
    ),
    "gain": lambda examples, work: fit_gain(
        replace(examples, target="benefit"),
        base=f"hf:{save_word_llama(work / 'llama')}",
        epochs=1,
        work=work / "gaining",
    ),
    "stack": lambda examples, work: stack_judges(
        examples,
        [
            train_answer_judge(
                AnswerTask("judge", 16, f"hf:{save_word_llama(work / 'llama')}"),
                examples,
                plan_ensemble(examples.split, replace(QUICK, epochs=1)),
                work=work / "stacking",
            )
        ],
        work=work / "stacked",
    ),
    "kbm": lambda examples, work: fit_kbm(
        examples,
        base=f"hf:{save_word_llama(work / 'llama')}",
        training=replace(QUICK, epochs=1),
        work=work / "training",
    ),
}


def label_facts(path: Path) -> Path:
    """The run they are fitted on, with everything that a gate reads."""
    plan = LabelOptions(samples=20, layers=(2, 4), seakr=True)
    run_labeling(RunFolder(path), FACTS, Labeler(MODEL, StringGrader(), plan), data="test")
    return path


def fit_every_gate(folder: Path) -> Path:
    """`folder` with the artefact of each gate under its name."""
    with quick():
        examples = load_examples([label_facts(folder / "run")], target="known")
        for name, fit in FITS.items():
            save_fitted(fit(examples, folder / "work"), examples, folder / name)
    return folder


def open_fitted(folder: Path, *, plug_in: bool = False) -> Gate:
    """The gate in a folder, with the embedding it was fitted with."""
    gate = load_gate(str(folder), plug_in=plug_in)
    assert isinstance(gate, FittedGate)
    return replace(gate, embedder=HashEmbedder()) if "embedder" in gate.artifact.options else gate
