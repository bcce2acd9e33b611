"""The kinds of judges that can be taught: a causal model that is spoken to, an encoder that reads pairs.

A school opens a base to be taught, and opens what came of it as gates do. Knows nothing of lessons.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from knowgate.errors import UnknownName
from knowgate.fitting.judges.encoder import EncoderPupil
from knowgate.fitting.judges.pupils import CausalPupil, Pupil
from knowgate.gates import (
    ENCODER_NAMES,
    Judge,
    PairEncoder,
    PairJudge,
    checked_adapters,
    encoder_source,
    is_encoder,
    open_base,
    open_judge,
    open_pairs,
)
from knowgate.models import load_model
from knowgate.runs import RECORDED
from knowgate.statistics import Floats

if TYPE_CHECKING:
    from knowgate.models import MarkedTokens


BARE = "the base has no chat template: it is asked in plain text, which suits models that were never taught to chat"


class Voter(Protocol):
    """A judge as far as fitting must know it."""

    def votes(self, cuts: Sequence[MarkedTokens]) -> list[Floats]: ...


J = TypeVar("J", bound=Voter)


@dataclass(frozen=True)
class Schooling(Generic[J]):
    """A base ready to be taught; `judge` makes its lessons, `pupil` learns them. notes: what the card says of it."""

    judge: J
    pupil: Pupil
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class School(Generic[J]):
    """begin: of a base, the two labels and a seed. open: of a folder, a gate's options and the name of its prompts."""

    begin: Callable[[str, tuple[str, str], int], Schooling[J]]
    open: Callable[[Path, Mapping[str, Any], str], J]
    options: Mapping[str, Any] = field(default_factory=dict)  # what the gate says of such a judge


def _causal(base: str, labels: tuple[str, str], seed: int, *, bits: int = 0) -> Schooling[Judge]:
    model = open_base(base, bits=bits)
    judge = Judge(model, labels)
    spoken_to = bool(model.loaded.tokenizer.chat_template)
    return Schooling(judge, CausalPupil(model, judge.columns), () if spoken_to else (BARE,))


def _pairs(base: str, labels: tuple[str, str], seed: int) -> Schooling[PairJudge]:
    encoder = PairEncoder(encoder_source(base), seed)
    encoder.read_weights()
    return Schooling(PairJudge((encoder,)), EncoderPupil(encoder))


def _open_pairs(folder: Path, options: Mapping[str, Any], prompts: str) -> PairJudge:
    return open_pairs(*checked_adapters(folder, options))


CAUSAL = School(_causal, open_judge)
PAIRS = School(_pairs, _open_pairs, {"pairs": True})


def answer_school(base: str, bits: int = 0) -> School[Any]:
    """Where a judge of answers learns: either kind serves. bits: of a causal base's weights; 0: the usual format."""
    if is_encoder(base):
        return PAIRS
    _check_known(base)
    return School(functools.partial(_causal, bits=bits), open_judge, {"bits": bits}) if bits else CAUSAL


def _check_known(base: str) -> None:
    """Of a name that is no model's, say what a judge of answers can be made of, encoders as well."""
    if base.startswith(RECORDED):
        return
    try:
        load_model(base)  # weights are read on first use
    except UnknownName:
        raise UnknownName("base", base, [*ENCODER_NAMES, "encoder:DIR", "smollm", "hf:NAME", "gguf:FILE"]) from None
