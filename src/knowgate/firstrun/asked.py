"""The questions of a first run: from a file, or written by an LLM. Each once, in an order that depends on no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from knowgate.datasets import data_spec, load_questions
from knowgate.errors import BadInput
from knowgate.files import sha256_text
from knowgate.firstrun.telling import Teller
from knowgate.firstrun.wishes import Wishes
from knowgate.firstrun.writing import Writer, WrittenFolder
from knowgate.labels import fingerprint_questions, golds
from knowgate.prompts import packaged
from knowgate.retrieval import passages_in_turn
from knowgate.runs import hashed_share, loose_key
from knowgate.types import Model, Question

FEWEST_WRITTEN = 20  # below, nothing can be learnt or shown, and the LLM that wrote them is better not trusted
TRIES = 5  # passages per question that is wanted; who writes one of use in five will not do
FEWEST_TRIES = 60


@dataclass(frozen=True)
class Asked:
    """questions: as many as are wanted, or all there are. every: those beyond, too. source: names all of them."""

    questions: list[Question]
    every: list[Question]
    source: str

    @property
    def has_more(self) -> bool:
        """As many as were wanted were found, so there may be more."""
        return len(self.every) > len(self.questions)

    @property
    def with_gold(self) -> int:
        return sum(bool(golds(question)) for question in self.questions)

    @property
    def has_gold(self) -> bool:
        """Most of them can be graded; else they are graded by agreement, all of them."""
        return 2 * self.with_gold >= len(self.questions)


def read_asked(wishes: Wishes, tell: Teller) -> Asked:
    """Those of a file: in the order of hashes, so that more of them leave the first ones first."""
    every = load_questions(data_spec(wishes.questions))
    first: dict[str, Question] = {}
    for question in every:
        first.setdefault(loose_key(question.text), question)
    if len(first) < len(every):
        tell.say(f"{len(every) - len(first)} questions are asked twice and left out.")
    ordered = sorted(first.items(), key=lambda item: hashed_share("first run", str(wishes.seed), item[0]))
    each = [question for _, question in ordered]
    asked = Asked(each[: wishes.count], each, fingerprint_questions(every))
    tell.say(_about(asked, len(first)))
    return asked


def _about(asked: Asked, there: int) -> str:
    taken = f"{len(asked.questions)} of {there} questions" if len(asked.questions) < there else f"{there} questions"
    if asked.has_gold:
        without = len(asked.questions) - asked.with_gold
        return f"{taken}, with gold answers" + (f"; {without} have none and cannot be graded." if without else ".")
    some = f" ({asked.with_gold} have one, too few to go by)" if asked.with_gold else ""
    return (
        f"{taken}, without gold answers{some}: what the LLM says with passages is taken for right, so what is proven "
        "is how seldom skipping changes the answer."
    )


def write_asked(wishes: Wishes, index: str, fingerprint: str, model: Model, tell: Teller) -> Asked:
    """Those the LLM writes; goes on where it was, and writes more where more are wanted."""
    settings = {"index": fingerprint, "writer": model.fingerprint, "prompts": packaged("write").fingerprint,
                "seed": wishes.seed}  # fmt: skip
    source = sha256_text(*map(str, settings.values()))[:16]
    folder = WrittenFolder(wishes.out / "written" / source[:8])
    most = max(FEWEST_TRIES, TRIES * wishes.count)
    with folder.exclusive():
        folder.start(settings, {})
        writer = Writer(model, folder, _showing(tell))
        writer.write(passages_in_turn(index, wishes.seed), wishes.count, most)
    questions = folder.questions[: wishes.count]
    tell.say(_left(folder, model.name))
    if len(questions) < min(FEWEST_WRITTEN, wishes.count):
        raise BadInput(_too_few(wishes, folder, model))
    return Asked(questions, folder.questions, source)


def _showing(tell: Teller) -> Callable[[int, int, int], None]:
    def show(tried: int, total: int, of_use: int) -> None:
        tell.show("writing questions", tried, total, "passages", f"{of_use} questions of use")

    return show


def _left(folder: WrittenFolder, name: str) -> str:
    refused = folder.refused
    reasons = "; ".join(f"{count}: {why}" for why, count in refused.most_common())
    of_use = len(folder.questions)
    said = f"{name} wrote {of_use} questions of use from {of_use + refused.total()} passages"
    look = f"Look at some before you trust a figure: {folder.path / folder.rows_name}"
    return f"{said}{f' (refused: {reasons})' if reasons else ''}. {look}"


def _too_few(wishes: Wishes, folder: WrittenFolder, model: Model) -> str:
    passages = len(folder.written())
    return (
        f"from {passages} passages {model.name} wrote {len(folder.questions)} questions of use; {FEWEST_WRITTEN} are "
        f"the fewest to go on with (all are in {folder.path / folder.rows_name}). Write some yourself, one per "
        f"line: {wishes.command(questions='questions.txt')} - or let a larger LLM write: "
        f"{wishes.command(writer='openai:MODEL@URL')}"
    )


def unlisted(index: str, wishes: Wishes) -> str:
    """Why no questions can be written; '' where they can."""
    if Path(index).is_dir():
        return ""
    return (
        f"no questions can be written from '{index}': a search endpoint does not list its passages. Give questions: "
        f"{wishes.command(questions='questions.txt')}"
    )
