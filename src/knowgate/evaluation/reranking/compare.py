"""CBDR's Tables 1 and 2 as one comparison: rerankers by sources of preference, and by answering LLMs and data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from knowgate.evaluation.reranking.answers import Answering
from knowgate.evaluation.reranking.controls import PassageMeans, ShortestFirst
from knowgate.evaluation.reranking.rankers import (
    BARE,
    ORACLE,
    RETRIEVER,
    SHOWN,
    Measured,
    Ranker,
    Ranking,
    measure_answers,
    measure_ranking,
    rank_all,
    usable,
)
from knowgate.preferences import Preference, PreferenceFolder, shared_settings
from knowgate.types import Reranker


@dataclass(frozen=True)
class HeldOut:
    """Preferences of one source: the rows of each data set to measure on, and those rerankers learnt from."""

    name: str
    model_fingerprint: str
    by_data: Mapping[str, list[Preference]] = field(repr=False)
    learnt: list[Preference] = field(repr=False)

    @property
    def rows(self) -> list[Preference]:
        return usable([row for rows in self.by_data.values() for row in rows])


@dataclass(frozen=True)
class RerankComparison:
    """rankings: by source. answers: by LLM and data set. seen: share of candidates the control knew, by source."""

    rankings: dict[str, Ranking]
    answers: dict[tuple[str, str], Measured]
    seen: dict[str, float] = field(default_factory=dict)


def is_reranker(name: str) -> bool:
    """Neither a control, nor an order that needs no reranker."""
    others = (RETRIEVER, ORACLE, BARE, ShortestFirst.name, PassageMeans.name)
    return name not in others and not name.startswith(f"{ORACLE},")


def held_out(folders: Iterable[PreferenceFolder], split: str, limit: int | None = None) -> list[HeldOut]:
    """The folders put together by source (and the length candidates were cut to), in the order given.

    limit: only the first so many questions of each data set.
    """
    by_source: dict[str, list[PreferenceFolder]] = {}
    for folder in folders:
        by_source.setdefault(_source(folder), []).append(folder)
    return [_held(name, some, split, limit) for name, some in by_source.items()]


def _source(folder: PreferenceFolder) -> str:
    settings = folder.manifest()["settings"]
    cut = f", cut to {settings['cut_to']} tokens" if settings.get("cut_to") else ""
    return f"{settings['source']}{cut}"


def _held(name: str, folders: Sequence[PreferenceFolder], split: str, limit: int | None) -> HeldOut:
    shared = shared_settings(folders)
    by_data: dict[str, list[Preference]] = {}
    learnt: list[Preference] = []
    for folder in folders:
        rows = list(folder.rows())
        learnt += [row for row in rows if row.split == "train" and row.error is None]
        if own := [row for row in rows if row.split == split]:
            by_data.setdefault(str(folder.manifest()["settings"]["data"]), []).extend(own)
    return HeldOut(
        name, str(shared["model_fingerprint"]), {data: rows[:limit] for data, rows in by_data.items()}, learnt
    )


def compare_rerankers(
    sets: Sequence[HeldOut],
    rerankers: Mapping[str, Reranker],
    *,
    answering: Mapping[str, Answering] | None = None,
    controls: bool = False,
    shown: Sequence[int] = SHOWN,
    margin: float | None = None,
    say: Callable[[str], None] = lambda word: None,
) -> RerankComparison:
    """Every reranker against every source's preferences; LLMs answer with the first passages of the first source's
    questions, whichever way they were ordered."""
    rankings: dict[str, Ranking] = {}
    seen: dict[str, float] = {}
    for held in sets:
        means = PassageMeans(held.learnt)
        own: dict[str, Reranker] = {
            **rerankers,
            **({"shortest first": ShortestFirst(), means.name: means} if controls else {}),
        }
        rankings[held.name] = measure_ranking(held.rows, rank_all(held.rows, own, margin, say), margin)
        seen |= {held.name: means.seen(held.rows)} if controls else {}
    answers = {
        (llm, data): _answered(data, sets, rerankers, one, controls, shown, say)
        for llm, one in (answering or {}).items()
        for data in sets[0].by_data
    }
    return RerankComparison(rankings, answers, seen)


def _answered(
    data: str,
    sets: Sequence[HeldOut],
    rerankers: Mapping[str, Reranker],
    answering: Answering,
    controls: bool,
    shown: Sequence[int],
    say: Callable[[str], None],
) -> Measured:
    rows = usable(sets[0].by_data[data])
    own = {**rerankers, **({"shortest first": ShortestFirst()} if controls else {})}
    rankers = [ranker for ranker in rank_all(rows, own) if ranker.name != ORACLE]
    return measure_answers(rows, [*rankers, *oracles(rows, sets)], answering, shown, say)


def oracles(rows: Sequence[Preference], sets: Sequence[HeldOut]) -> list[Ranker]:
    """The order of each source's own shifts, where it measured the same candidates: how good the signal itself is."""
    found = []
    for held in sets:
        shifts = {(row.id, one.id, one.text): one.shift for row in held.rows for one in row.candidates}
        wanted = [[(row.id, one.id, one.text) for one in row.candidates] for row in rows]
        if all(key in shifts for keys in wanted for key in keys):
            found.append(Ranker(f"{ORACLE}, {held.name}", [[shifts[key] for key in keys] for keys in wanted]))
    return found
