"""The verb `prefer`: label runs in, a folder of preferences out. Gathers questions, model, candidates and source.

Knows label runs and specs; how shifts are measured and rows are kept is `measure`'s and `session`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from knowgate.datasets import load_questions
from knowgate.doors import check_seed, check_whole
from knowgate.errors import BadInput, BadSetting
from knowgate.labels import far_runner, is_far, joined, named, near_runner
from knowgate.models import as_model
from knowgate.preferences.recipe import PreferRecipe, identity
from knowgate.preferences.record import TOP, PreferenceFolder
from knowgate.preferences.session import BATCH, PreferenceCounts, prefer_run
from knowgate.prompts import AnswerPrompts
from knowgate.retrieval import load_retriever
from knowgate.runs import RunFolder, question_of
from knowgate.types import Model, Question, Runner

CANDIDATES = 20
SOURCES = ("confidence", "benefit", "likelihood")
# CBDR has confidence, whose own order of the passages leads to fewer right answers than the base's, while that of the
# likelihood leads to 5 to 21 points more (1,000 questions, Qwen2.5-Coder-1.5B: benchmarks/runs/cbdr)
DEFAULT_SOURCE = "likelihood"
SPLITS = ("train", "dev", "test")
Run = str | Path | RunFolder


def prefer(
    runs: Run | Iterable[Run],
    out: str | Path,
    *,
    source: str | None = None,
    gate: str | None = None,
    index: str | None = None,
    data: str | None = None,
    candidates: int = CANDIDATES,
    top: int = TOP,
    cut: int | None = None,
    model: str | Model | None = None,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    prompts: AnswerPrompts | None = None,
    runner: str | Runner | None = None,
    watch: Callable[[PreferenceCounts], None] = lambda counts: None,
) -> PreferenceCounts:
    """Measure what each candidate passage does to the LLM that was labelled; the same call goes on where it stopped.

    source: likelihood (of the gold answer; the default), benefit (answers turned right) or confidence (shift of the
    fitted probe `gate`; the default where there is one). Candidates come from `index`, from the contexts of `data`, or
    from the runs' own passages. cut: tokens they are all cut to, as a control. split: puts all questions in train, dev
    or test; None divides them as `fit` does. runner: 'local', or a Ray cluster as in `label`.
    """
    source = source or ("confidence" if gate else DEFAULT_SOURCE)
    _check(source, split, index, data, cut)
    check_whole(candidates, "the number of candidates", least=2)
    check_whole(top, "top")
    check_seed(seed)
    far = is_far(runner)
    folders = _folders(runs)
    questions = _questions(folders, data, limit, has_index=index is not None)
    llm = _model(folders, model)
    wording, spec = prompts or AnswerPrompts(), named("model", model or folders[0].settings()["model"]) if far else ""
    recipe = PreferRecipe(spec or "", source, gate, wording, index, candidates, top, seed, split, cut)
    preferrer = recipe.preferrer(llm, load_retriever(index) if index else None)
    doing: Runner = near_runner(runner) or BATCH
    if far:
        doing = far_runner(str(runner), recipe, preferrer.failed, identity(preferrer))
    made_of = data or ", ".join(str(folder.settings().get("data", folder.path.name)) for folder in folders)
    folder = PreferenceFolder(Path(out))
    with joined(doing, folder.path):
        return prefer_run(folder, questions, preferrer, data=made_of, runner=doing, on_progress=watch)


def _check(source: str, split: str | None, index: str | None, data: str | None, cut: int | None) -> None:
    if cut is not None:
        check_whole(cut, "the number of tokens passages are cut to (--cut)")
    for option, value, allowed in (("source", source, SOURCES), ("split", split, (None, *SPLITS))):
        if value not in allowed:
            raise BadSetting(f"--{option} is '{value}'; allowed: {', '.join(str(word) for word in allowed if word)}.")
    if index and data:
        raise BadSetting("candidates come from --index or from the contexts of --data, not from both.")


def _folders(runs: Run | Iterable[Run]) -> list[RunFolder]:
    several: Iterable[Run] = [runs] if isinstance(runs, Run) else runs
    return [run if isinstance(run, RunFolder) else RunFolder(Path(run)) for run in several]


def _questions(folders: Sequence[RunFolder], data: str | None, limit: int | None, *, has_index: bool) -> list[Question]:
    """Each labelled question once, with its candidates as contexts unless an index gives them."""
    questions: dict[str, Question] = {}
    for folder in folders:
        for row in folder.rows():
            if row.error is None and (limit is None or len(questions) < limit):
                own = () if has_index or data else row.passages
                questions.setdefault(row.id, replace(question_of(row), contexts=own))
    if not questions:
        raise BadInput(
            f"{', '.join(str(folder.path) for folder in folders)}: no labelled question to start from. "
            "Label some: knowgate label"
        )
    return _with_contexts(questions, data) if data else list(questions.values())


def _with_contexts(questions: Mapping[str, Question], data: str) -> list[Question]:
    contexts = {question.id: question.contexts for question in load_questions(data)}
    missing = [name for name in questions if name not in contexts]
    if missing:
        raise BadInput(
            f"{data} lacks {len(missing)} of the {len(questions)} labelled questions ('{missing[0]}', for one). "
            "Name the data the run was made from, or an --index."
        )
    return [replace(question, contexts=contexts[name]) for name, question in questions.items()]


def _model(folders: Sequence[RunFolder], given: str | Model | None) -> Model:
    """The LLM that was labelled; another one would mix up whose preferences these are."""
    settings = [folder.settings() for folder in folders]
    llm = as_model(given or settings[0]["model"])
    for folder, made in zip(folders, settings, strict=True):
        if made.get("model_fingerprint") != llm.fingerprint:
            raise BadSetting(
                f"'{folder.path}' was labelled by {made.get('model')} ({made.get('model_fingerprint')}), not by "
                f"{llm.name} ({llm.fingerprint}). Label with this model, or give the other as --model."
            )
    return llm
