"""The door for fitted arbiters: a damaged folder is refused, or believes what the whole one does.

A forger who makes the checksums fit may change values; then what comes out must still be probabilities.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from knowgate.core.artifacts import compute_digests
from knowgate.errors import KnowgateError
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.arbiters.offline_arbitration import get_answer_pair
from knowgate.gates.artifacts.gate_folder import compute_checksum
from knowgate.training.arbiter import fit_arbiter
from knowgate.types import AnswerPair, Belief
from tests.support.fuzz import attempt, tries
from tests.support.mutations import damaged_copies
from tests.support.pairs_by_hand import pair_rows, pair_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("arbiter")
    return fit_arbiter(pair_run(place / "run"), out=place / "arbiter").artifact.path


PAIRS = [get_answer_pair(row) for row in pair_rows(8, seed=5)]


def used(folder: Path, answers: list[AnswerPair] = PAIRS) -> list[Belief]:
    arbiter = load_arbiter(str(folder))
    assert repr(arbiter)
    assert isinstance(arbiter.needs_passages, bool)
    assert arbiter.needs >= frozenset()
    return arbiter.estimate(answers)


def sign(folder: Path) -> None:
    """As a forger would: every digest and checksum fits again."""
    manifest = json.loads((folder / "arbiter.json").read_text())
    manifest["files"] = compute_digests(folder, exclude=["arbiter.json", "README.md"])
    manifest["checksum"] = compute_checksum(manifest)
    (folder / "arbiter.json").write_text(json.dumps(manifest))


def test_a_damaged_arbiter_is_refused_or_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, place = used(folder), tmp_path / "copy"
    for mutation in damaged_copies(folder, place, tries(60, 400), 3, sign):
        forged = " with checksums that fit" if mutation.signed else ""
        outcome = attempt("fitted arbiters", f"{mutation.kind}{forged}", lambda: used(place))
        if outcome.refusal:
            continue
        beliefs: list[Belief] = outcome.value  # type: ignore[assignment]
        if mutation.signed:
            assert all(0 <= one <= 1 for belief in beliefs for one in (belief.closed, belief.open)), mutation
        else:
            assert beliefs == whole, mutation
    assert not Path("exploded").exists()


def test_a_folder_of_a_gate_is_no_arbiter(tmp_path: Path) -> None:
    (tmp_path / "gate.json").write_text("{}")
    with pytest.raises(KnowgateError, match="unknown arbiter"):
        load_arbiter(str(tmp_path))
