"""The verb `prefer`: label runs in, a folder of preferences out. Gathers questions, model, candidates and source.

Knows label runs and specs; how shifts are measured and rows are kept is `measure`'s and `session`'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from knowgate.core.files import atomic_file
from knowgate.core.validation import check_integer, check_seed
from knowgate.data.preferences import DEFAULT_TOP, PAIRS_FILE, Preference, PreferenceFolder, to_cbdr_record
from knowgate.data.questions import load_questions
from knowgate.data.row_folder import explain_disk_error
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.storage import question_from_row
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_gate
from knowgate.gates.hidden_state import ProbeGate
from knowgate.labels.grading import load_grader
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.ray_runner import (
    connect_early,
    create_ray_runner,
    get_local_runner,
    is_remote_runner,
    require_name,
)
from knowgate.labels.run import describe_environment, fingerprint_questions
from knowgate.models import load_model, resolve_model
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.retrieval import load_retriever
from knowgate.training.passage_effects import (
    BenefitSource,
    ConfidenceSource,
    EffectSource,
    LikelihoodSource,
    PreferenceLabeler,
)
from knowgate.types import Model, Question, Retriever, Runner


@dataclass(frozen=True)
class PreferenceJobSpec:
    """Names of the LLM, the source, its probe and the index; how many candidates are looked at and kept."""

    model: str
    source: str
    gate: str | None
    prompts: AnswerPrompts
    index: str | None
    candidates: int
    top: int
    seed: int = 0
    split: str | None = None
    cut: int | None = None

    def make(self, retriever: Retriever | None) -> PreferenceJob:
        return PreferenceJob(self.preferrer(load_model(self.model), retriever))

    def preferrer(self, llm: Model, retriever: Retriever | None) -> PreferenceLabeler:
        measuring = load_effect_source(self.source, llm, self.gate, self.prompts)
        return PreferenceLabeler(measuring, retriever, self.candidates, self.top, self.seed, self.split, self.cut)


@dataclass(frozen=True)
class PreferenceJob:
    """A preferrer on the machine where it works."""

    preferrer: PreferenceLabeler

    @property
    def identity(self) -> dict[str, str]:
        return identify_preference_job(self.preferrer)

    def __call__(self, questions: Sequence[Question]) -> list[Preference]:
        return self.preferrer.prefer(questions)


def identify_preference_job(preferrer: PreferenceLabeler) -> dict[str, str]:
    """Which LLM, wording, probe and index rows are made with."""
    source = preferrer.source
    told = {"model": source.model.fingerprint, "wording": source.prompts.fingerprint}
    if isinstance(source, ConfidenceSource):
        told["probe"] = str(source.gate.artifact.manifest["checksum"])
    return told | ({"index": preferrer.retriever.fingerprint} if preferrer.retriever is not None else {})


def load_effect_source(name: str, llm: Model, gate: str | None, prompts: AnswerPrompts) -> EffectSource:
    """The way of measuring behind a name."""
    if name == "benefit":
        return BenefitSource(llm, load_grader("contains", None, "implies"), prompts)
    if name == "likelihood":
        return LikelihoodSource(llm, prompts)
    probe = load_gate(gate) if gate else None
    if not isinstance(probe, ProbeGate):
        given = f"is '{gate}'" if gate else "is missing"
        raise BadSetting(
            f"--source confidence reads a fitted probe; --gate {given}. "
            "Fit one: knowgate fit probe --target known --balanced --labels RUN --out DIR"
        )
    return ConfidenceSource(llm, probe.bind(llm, prompts.fingerprint), prompts)


PREFERENCE_RUNNER = LocalRunner(
    largest=256
)  # questions; each has some 20 prompts, and a GPU reads thousands in a few seconds


@dataclass(frozen=True)
class PreferenceProgress:
    """How far a run is, and what was left out. `fresh`, `prompts` and `seconds` are those of this start."""

    total: int
    done: int = 0
    kept: int = 0
    one_sided: int = 0  # without positives, or without negatives
    bare: int = 0  # without candidates
    failed: int = 0
    duplicates: int = 0
    cut: int = 0
    fresh: int = 0
    prompts: int = 0
    seconds: float = 0.0

    def plus(self, rows: Sequence[Preference], *, fresh: bool = True, seconds: float = 0.0) -> PreferenceProgress:
        good = [row for row in rows if row.error is None]
        return replace(
            self,
            done=self.done + len(rows),
            kept=self.kept + sum(row.is_kept for row in good),
            one_sided=self.one_sided + sum(bool(row.candidates) and not row.is_kept for row in good),
            bare=self.bare + sum(not row.candidates for row in good),
            failed=self.failed + len(rows) - len(good),
            duplicates=self.duplicates + sum(row.duplicates for row in good),
            cut=self.cut + sum(row.cut for row in good),
            fresh=self.fresh + fresh * len(rows),
            prompts=self.prompts + fresh * sum(1 + len(row.candidates) for row in good),
            seconds=seconds,
        )


def run_preferences(
    folder: PreferenceFolder,
    questions: Sequence[Question],
    preferrer: PreferenceLabeler,
    *,
    data: str,
    runner: Runner = PREFERENCE_RUNNER,
    on_progress: Callable[[PreferenceProgress], None] = lambda counts: None,
) -> PreferenceProgress:
    """Measure all questions that have no row yet; every finished batch is on disk before the next begins."""
    with folder.exclusive():
        try:
            counts = _run(folder, questions, preferrer, data, runner, on_progress)
            _write_pairs(folder)
        except OSError as error:
            raise explain_disk_error(error, folder.path) from error
    _check(counts, preferrer)
    return counts


def _run(
    folder: PreferenceFolder,
    questions: Sequence[Question],
    preferrer: PreferenceLabeler,
    data: str,
    runner: Runner,
    on_progress: Callable[[PreferenceProgress], None],
) -> PreferenceProgress:
    folder.start(describe_preference_run(preferrer, questions, data), describe_environment())
    counts, done = PreferenceProgress(len(questions)), set[str]()
    for row in folder.rows():
        counts = counts.plus([row], fresh=False)
        done.add(row.id)
    on_progress(counts)
    start = time.perf_counter()
    try:
        for rows in runner.run([question for question in questions if question.id not in done], preferrer.prefer):
            _check_found(rows, counts, preferrer)
            folder.append(rows)
            counts = counts.plus(rows, seconds=time.perf_counter() - start)
            on_progress(counts)
    finally:
        folder.update(totals=asdict(counts))
    return counts


def describe_preference_run(preferrer: PreferenceLabeler, questions: Sequence[Question], data: str) -> dict[str, Any]:
    """The settings that make a run what it is; two runs with the same ones give the same rows."""
    source, retriever = preferrer.source, preferrer.retriever
    settings: dict[str, Any] = {
        "data": data,
        "data_fingerprint": fingerprint_questions(questions),
        "questions": len(questions),
        "model": source.model.name,
        "model_fingerprint": source.model.fingerprint,
        "prompts_fingerprint": source.prompts.fingerprint,
        "retriever": retriever.name if retriever else "contexts",
        "retriever_fingerprint": retriever.fingerprint if retriever else None,
        "source": source.name,
        "candidates": preferrer.candidates,
        "top": preferrer.top,
        "seed": preferrer.seed,
        "split": preferrer.split,
    }
    if preferrer.cut is not None:  # folders begun before there was such a thing can go on
        settings["cut_to"] = preferrer.cut
    if isinstance(source, ConfidenceSource):
        made = source.gate.artifact
        settings["probe"] = {"name": made.path.name, "checksum": made.manifest["checksum"], **made.options}
    if isinstance(source, BenefitSource):
        settings["grader"] = source.grader.name
    return settings


def _check_found(rows: Sequence[Preference], counts: PreferenceProgress, preferrer: PreferenceLabeler) -> None:
    """Candidates are missing for everything asked so far: say so at once, not after an hour."""
    if counts.done > counts.bare or any(row.candidates or row.error for row in rows):
        return
    where = "the index holds other documents" if preferrer.retriever else "the questions have no passages of their own"
    raise BadInput(
        f"no candidate passage was found for any of the first {len(rows)} questions: {where}. "
        "Give the index of the documents they are about (--index), or data with contexts (--data)."
    )


def _check(counts: PreferenceProgress, preferrer: PreferenceLabeler) -> None:
    if counts.done == counts.total and not counts.kept:
        raise BadInput(
            f"none of {counts.total} questions has both passages that help and passages that hurt by "
            f"'{preferrer.source.name}' ({counts.one_sided} have one kind only, {counts.bare} no passages, "
            f"{counts.failed} failed): nothing can be learnt from them. Use more questions or candidates, or another "
            "--source."
        )


def _write_pairs(folder: PreferenceFolder) -> None:
    lines = (json.dumps(to_cbdr_record(row), ensure_ascii=False) + "\n" for row in folder.rows() if row.is_kept)
    with atomic_file(folder.path / PAIRS_FILE) as file:
        file.writelines(line.encode() for line in lines)


DEFAULT_CANDIDATES = 20
SOURCE_NAMES = ("confidence", "benefit", "likelihood")
# CBDR has confidence, whose own order of the passages leads to fewer right answers than the base's, while that of the
# likelihood leads to 5 to 21 points more (1,000 questions, Qwen2.5-Coder-1.5B: benchmarks/runs/cbdr)
DEFAULT_SOURCE = "likelihood"
SPLIT_NAMES = ("train", "dev", "test")
RunPath = str | Path | RunFolder


def measure_preferences(
    runs: RunPath | Iterable[RunPath],
    out: str | Path,
    *,
    source: str | None = None,
    gate: str | None = None,
    index: str | None = None,
    data: str | None = None,
    candidates: int = DEFAULT_CANDIDATES,
    top: int = DEFAULT_TOP,
    cut: int | None = None,
    model: str | Model | None = None,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    prompts: AnswerPrompts | None = None,
    runner: str | Runner | None = None,
    watch: Callable[[PreferenceProgress], None] = lambda counts: None,
) -> PreferenceProgress:
    """Measure what each candidate passage does to the LLM that was labelled; the same call goes on where it stopped.

    source: likelihood (of the gold answer; the default), benefit (answers turned right) or confidence (shift of the
    fitted probe `gate`; the default where there is one). Candidates come from `index`, from the contexts of `data`, or
    from the runs' own passages. cut: tokens they are all cut to, as a control. split: puts all questions in train, dev
    or test; None divides them as `fit` does. runner: 'local', or a Ray cluster as in `label`.
    """
    source = source or ("confidence" if gate else DEFAULT_SOURCE)
    _from_labels_check(source, split, index, data, cut)
    check_integer(candidates, "the number of candidates", minimum=2)
    check_integer(top, "top")
    check_seed(seed)
    far = is_remote_runner(runner)
    folders = _folders(runs)
    questions = _questions(folders, data, limit, has_index=index is not None)
    llm = _model(folders, model)
    wording, spec = (
        prompts or AnswerPrompts(),
        require_name("model", model or folders[0].settings()["model"]) if far else "",
    )
    recipe = PreferenceJobSpec(spec or "", source, gate, wording, index, candidates, top, seed, split, cut)
    preferrer = recipe.preferrer(llm, load_retriever(index) if index else None)
    doing: Runner = get_local_runner(runner) or PREFERENCE_RUNNER
    if far:
        doing = create_ray_runner(str(runner), recipe, preferrer.failed, identify_preference_job(preferrer))
    made_of = data or ", ".join(str(folder.settings().get("data", folder.path.name)) for folder in folders)
    folder = PreferenceFolder(Path(out))
    with connect_early(doing, folder.path):
        return run_preferences(folder, questions, preferrer, data=made_of, runner=doing, on_progress=watch)


def _from_labels_check(source: str, split: str | None, index: str | None, data: str | None, cut: int | None) -> None:
    if cut is not None:
        check_integer(cut, "the number of tokens passages are cut to (--cut)")
    for option, value, allowed in (("source", source, SOURCE_NAMES), ("split", split, (None, *SPLIT_NAMES))):
        if value not in allowed:
            raise BadSetting(f"--{option} is '{value}'; allowed: {', '.join(str(word) for word in allowed if word)}.")
    if index and data:
        raise BadSetting("candidates come from --index or from the contexts of --data, not from both.")


def _folders(runs: RunPath | Iterable[RunPath]) -> list[RunFolder]:
    several: Iterable[RunPath] = [runs] if isinstance(runs, RunPath) else runs
    return [run if isinstance(run, RunFolder) else RunFolder(Path(run)) for run in several]


def _questions(folders: Sequence[RunFolder], data: str | None, limit: int | None, *, has_index: bool) -> list[Question]:
    """Each labelled question once, with its candidates as contexts unless an index gives them."""
    questions: dict[str, Question] = {}
    for folder in folders:
        for row in folder.rows():
            if row.error is None and (limit is None or len(questions) < limit):
                own = () if has_index or data else row.passages
                questions.setdefault(row.id, replace(question_from_row(row), contexts=own))
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
    llm = resolve_model(given or settings[0]["model"])
    for folder, made in zip(folders, settings, strict=True):
        if made.get("model_fingerprint") != llm.fingerprint:
            raise BadSetting(
                f"'{folder.path}' was labelled by {made.get('model')} ({made.get('model_fingerprint')}), not by "
                f"{llm.name} ({llm.fingerprint}). Label with this model, or give the other as --model."
            )
    return llm
