"""`knowgate prefer`: which passages can this LLM use?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from knowgate.cli.paths import path
from knowgate.cli.progress import question_bar
from knowgate.datasets import load_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.gates import load_gate
from knowgate.labels import load_grader
from knowgate.models import load_model
from knowgate.pipeline import Settings, build_prompts
from knowgate.prompts import AnswerPrompts
from knowgate.retrieval import load_retriever
from knowgate.runs import RunFolder, question_of
from knowgate.types import Model, Question

if TYPE_CHECKING:
    from knowgate.preferences import PreferenceCounts, Source

WORDS = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
SOURCES = ("confidence", "benefit", "likelihood")
SPLITS = ("train", "dev", "test")


def prefer(
    labels: Annotated[
        list[Path], typer.Option(parser=path, metavar="RUN", help="Label run with the questions; may be repeated.")
    ],
    out: Annotated[
        Path,
        typer.Option(parser=path, metavar="PREF", help="Preference folder. The same command goes on where it stopped."),
    ],
    gate: Annotated[
        str | None, typer.Option(metavar="PROBE", help="Fitted probe; --source confidence reads its shift.")
    ] = None,
    index: Annotated[str | None, typer.Option(help="Index folder or http:URL that candidates come from.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Data spec whose contexts are the candidates. Default: the run's own passages.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=2, help="Candidate passages of each question.")] = 20,
    source: Annotated[
        str,
        typer.Option(
            help="confidence (shift of the probe), benefit (answers turned right) or likelihood (of the gold answer)."
        ),
    ] = "confidence",
    top: Annotated[int, typer.Option(min=1, help="Positives and negatives kept of each question.")] = 5,
    model: Annotated[str | None, typer.Option(help="Model spec. Default: the label run's.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Put all questions in train, dev or test. Default: divided as `fit` does.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")] = None,
    seed: Annotated[int, typer.Option(help="Of the split.")] = 0,
    lang: Annotated[str | None, typer.Option(help="Force the prompt language: en or zh.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="TOML file with your own answer prompts.")
    ] = None,
) -> None:
    """Measure what each candidate passage does to the LLM: the data `fit reranker` learns from. Resumable.

    Example: knowgate prefer --labels run --gate my-probe --index my-index --out pref
    """
    from knowgate.preferences import PreferenceFolder, Preferrer, prefer_run

    _check(source, split, index, data)
    folders = [RunFolder(run) for run in labels]
    questions = _questions(folders, data, limit, has_index=index is not None)
    llm = _model(folders, model)
    measuring = _source(source, llm, gate, build_prompts(Settings(lang=lang, prompts=prompts)))
    preferrer = Preferrer(measuring, load_retriever(index) if index else None, candidates, top, seed, split)
    folder = PreferenceFolder(out)
    named = data or ", ".join(str(run.settings().get("data", run.path.name)) for run in folders)
    try:
        with _bar() as show:
            counts = prefer_run(folder, questions, preferrer, data=named, on_progress=show)
    except KeyboardInterrupt:
        WORDS.print(f"{len(folder.done())} of {len(questions)} questions are safe in {out}; the same command goes on.")
        raise
    _summary(counts, out)


def _check(source: str, split: str | None, index: str | None, data: str | None) -> None:
    for option, value, allowed in (("source", source, SOURCES), ("split", split, (None, *SPLITS))):
        if value not in allowed:
            raise BadSetting(f"--{option} is '{value}'; allowed: {', '.join(str(a) for a in allowed if a)}.")
    if index and data:
        raise BadSetting("candidates come from --index or from the contexts of --data, not from both.")


def _questions(folders: Sequence[RunFolder], data: str | None, limit: int | None, *, has_index: bool) -> list[Question]:
    """Each labelled question once, with its candidates as contexts unless an index gives them."""
    found: dict[str, Question] = {}
    for folder in folders:
        for row in folder.rows():
            if row.error is None and (limit is None or len(found) < limit):
                own = () if has_index or data else row.passages
                found.setdefault(row.id, replace(question_of(row), contexts=own))
    if not found:
        raise BadInput(f"{', '.join(str(folder.path) for folder in folders)}: no labelled question to start from.")
    return _with_contexts(found, data) if data else list(found.values())


def _with_contexts(questions: Mapping[str, Question], data: str) -> list[Question]:
    contexts = {question.id: question.contexts for question in load_questions(data)}
    missing = [name for name in questions if name not in contexts]
    if missing:
        raise BadInput(
            f"{data} lacks {len(missing)} of the {len(questions)} labelled questions ('{missing[0]}', for one). "
            "Name the data the run was made from, or an --index."
        )
    return [replace(question, contexts=contexts[name]) for name, question in questions.items()]


def _model(folders: Sequence[RunFolder], spec: str | None) -> Model:
    """The LLM that was labelled; another one would mix up whose preferences these are."""
    settings = [folder.settings() for folder in folders]
    llm = load_model(spec or settings[0]["model"])
    for folder, made in zip(folders, settings, strict=True):
        if made.get("model_fingerprint") != llm.fingerprint:
            raise BadSetting(
                f"'{folder.path}' was labelled by {made.get('model')} ({made.get('model_fingerprint')}), not by "
                f"{llm.name} ({llm.fingerprint}). Label with this model, or give the other as --model."
            )
    return llm


def _source(name: str, llm: Model, gate: str | None, prompts: AnswerPrompts) -> Source:
    from knowgate.gates import ProbeGate
    from knowgate.preferences import Benefit, Confidence, Likelihood

    if name == "benefit":
        return Benefit(llm, load_grader("contains", None, "implies"), prompts)
    if name == "likelihood":
        return Likelihood(llm, prompts)
    probe = load_gate(gate) if gate else None
    if not isinstance(probe, ProbeGate):
        given = f"is '{gate}'" if gate else "is missing"
        raise BadSetting(
            f"--source confidence reads a fitted probe; --gate {given}. "
            "Fit one: knowgate fit probe --labels RUN --out DIR"
        )
    return Confidence(llm, probe.bind(llm, prompts.fingerprint), prompts)


@contextmanager
def _bar() -> Iterator[Any]:
    with question_bar("measuring", WORDS) as show:

        def show_counts(counts: PreferenceCounts) -> None:
            pace = f"{counts.prompts / counts.seconds:.1f} prompts/s" if counts.seconds else ""
            show(counts.done, counts.total, pace)

        yield show_counts


def _summary(counts: PreferenceCounts, out: Path) -> None:
    left = (
        (counts.one_sided, "with passages of one kind only"),
        (counts.bare, "without passages"),
        (counts.failed, "failed (see 'error' in the rows)"),
    )
    dropped = "; ".join(f"{n} {why}" for n, why in left if n)
    WORDS.print(
        f"{counts.kept} of {counts.done} questions have passages that help and passages that hurt"
        + (f"; left out: {dropped}" if dropped else "")
        + f". Duplicate passages dropped: {counts.duplicates}; cut to the context window: {counts.cut}."
    )
    WORDS.print(f"Learn from them: knowgate fit reranker --pref {out} --out DIR")
