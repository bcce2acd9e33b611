"""Questions divided into those a gate is fitted on, those its threshold is chosen on, and those that measure it.

By their place in an order that knows no answer. Who wants more questions later finds the earlier ones where they were:
they are labelled in rounds, and a round stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from knowgate.doors import read_json
from knowgate.errors import ArtefactError, BadInput
from knowgate.files import write_json
from knowgate.typed import read_record
from knowgate.types import Question

Part = Literal["fit", "calibration", "test"]
PARTS: tuple[Part, ...] = get_args(Part)
# Half to learn from, three tenths for the threshold, two tenths to measure: of a hundred, 50, 30 and 20.
TURN: tuple[Part, ...] = ("fit", "calibration", "fit", "test", "fit",
                          "calibration", "fit", "calibration", "fit", "test")  # fmt: skip
FEWEST = 20  # questions; fewer are all measured on, for nothing can be learnt or chosen
FILE = "rounds.json"


@dataclass(frozen=True)
class Round:
    """Questions that are labelled together; `name` is the folder of their label run."""

    name: str
    part: Part
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Rounds:
    rounds: tuple[Round, ...] = ()

    def runs(self, folder: Path, *parts: Part) -> list[Path]:
        """Folders of the label runs of these parts."""
        return [folder / one.name for one in self.rounds if one.part in parts]

    def plus(self, questions: Sequence[Question]) -> Rounds:
        """With a round more for each part that has new questions."""
        known = {key for one in self.rounds for key in one.ids}
        parts = divide(questions)
        fresh = {part: tuple(one.id for one in parts[part] if one.id not in known) for part in PARTS}
        added = [Round(self._name(part), part, ids) for part, ids in fresh.items() if ids]
        return Rounds((*self.rounds, *added))

    def _name(self, part: Part) -> str:
        return f"{part}-{1 + sum(one.part == part for one in self.rounds)}"


def divide(questions: Sequence[Question]) -> Mapping[Part, list[Question]]:
    """Each part's questions. The first of a longer list fall into the parts they would fall into alone."""
    turn: tuple[Part, ...] = TURN if len(questions) >= FEWEST else ("test",)
    return {part: [one for place, one in enumerate(questions) if turn[place % len(turn)] == part] for part in PARTS}


def read_rounds(folder: Path) -> Rounds:
    file = folder / FILE
    if not file.is_file():
        return Rounds()
    try:
        return read_record(Rounds, read_json(file), str(file))
    except BadInput as error:
        raise ArtefactError(f"{str(error).rstrip('.')}. Delete the folder '{folder}' and start again.") from None


def write_rounds(folder: Path, rounds: Rounds) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"name": one.name, "part": one.part, "ids": list(one.ids)} for one in rounds.rounds]
    write_json(folder / FILE, {"rounds": lines})
