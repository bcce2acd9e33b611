"""`knowgate fit`: one command for each gate, with its own few options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from knowgate.cli.fit import print_policy
from knowgate.gates import FITTED_GATES
from knowgate.training.policy.search import FittedPolicy
from tests.cli.conftest import Call
from tests.support.extras import needs_train
from tests.support.planted_run import planted_rows, write_run

FITTABLE = {name: entry for name, entry in FITTED_GATES.items() if entry.fit}
SHARED = ("--labels", "--out", "--target", "--threshold", "--seed")
LINES = 60  # of a help page on a terminal of 100 columns


@pytest.fixture
def narrow(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("COLUMNS", "100")
    return call


def test_the_summary_of_a_policy_names_flags_not_arguments(capfd, tmp_path: Path):
    lines = ("Chosen: x.", "To save costs instead, set `price_wrong` below that.", "Or set `max_loss` to 0.02.")
    print_policy(FittedPolicy(tmp_path, None, None, lines), "my-llm")
    printed = " ".join(capfd.readouterr().err.split())
    assert "set --price-wrong below that. Or set --max-loss to 0.02." in printed


def test_the_group_lists_the_gates_with_their_summaries(call: Call):
    shown = " ".join(call("fit", "--help").out.split())
    for name, entry in FITTABLE.items():
        assert f"{name} " in shown
        assert entry.summary in shown
    assert "reranker" in shown


@pytest.mark.parametrize("name", [*FITTABLE])
def test_the_help_of_a_gate_has_the_shared_options_and_fits_a_screen(narrow: Call, name: str):
    shown = narrow("fit", name, "--help")
    assert shown.code == 0
    assert all(option in shown.out for option in SHARED)
    assert len(shown.out.splitlines()) <= LINES
    assert max(len(line) for line in shown.out.splitlines()) <= 100


def test_the_help_of_the_reranker_fits_a_screen(narrow: Call):
    shown = narrow("fit", "reranker", "--help").out
    assert "--pref" in shown
    assert len(shown.splitlines()) <= LINES


def test_the_help_of_the_probe_has_its_options_and_no_others(call: Call):
    shown = call("fit", "probe", "--help").out
    for words in ("Options of probe", "--layer", "--position", "pre|post", "--kind", "mlp|linear"):
        assert words in shown
    for other in ("--cheap", "--tokens", "--pref", "--epochs"):
        assert other not in shown


def test_help_needs_no_training_package():
    code = (
        "import sys\n"
        "for name in ('sklearn', 'scipy', 'peft', 'torch', 'transformers', 'threadpoolctl'):\n"
        "    sys.modules[name] = None\n"
        "from knowgate.cli.main import run\n"
        "sys.exit(sum(run(['fit', name, '--help']) for name in sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *FITTABLE, "reranker"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_train
def test_a_probe_is_fitted_as_ever(call: Call, tmp_path: Path):
    run = write_run(tmp_path / "run", *planted_rows(120))
    fitted = call("fit", "probe", "--labels", run, "--target", "known", "--layer", "4", "--kind", "linear", "--out", "probe")  # fmt: skip  # noqa: E501
    assert fitted.code == 0
    assert "auroc" in fitted.out
    assert "Use it: knowgate ask --gate probe" in fitted.err
    assert "Only" in fitted.err  # few questions were held out
    assert Path("probe/gate.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["probe", "--out", "x", "--cheap"],
            2,
            "No such option: --cheap (Possible options: --help). See: knowgate fit probe --help",
        ),
        (["probe", "--out", "x"], 1, "gate 'probe' learns from recorded answers. Set --labels to folders of"),
        (["prob", "--out", "x"], 1, "unknown fitted gate 'prob'. Did you mean 'probe'?"),
        (["probe", "--labels", "run"], 2, "Missing option '--out'"),
        (
            ["probe", "--out", "x", "--labels", "run", "--kind", "deep"],
            1,
            "--kind 'deep' is not allowed: it must be 'mlp' or 'linear'.",
        ),
        (
            ["probe", "--out", "x", "--labels", "run", "--target", "all"],
            1,
            "--target 'all' is not allowed",
        ),
        (["ik", "--out", "x", "--tokens", "many"], 2, "Invalid value for '--tokens'"),
        (
            ["--labels", "run", "probe"],
            2,
            "--labels must follow the name of the gate. Example: knowgate fit probe --labels PATH",
        ),
    ],
)
def test_wrong_usage_is_a_sentence(call: Call, arguments: list[str], code: int, said: str):
    done = call("fit", *arguments)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert len(done.err.splitlines()) == 1


@needs_train
def test_a_pooled_fit_shows_every_run(call, tmp_path):
    for seed, name in enumerate(("one", "two")):
        write_run(tmp_path / name, *planted_rows(80, seed=seed))
    labels = ["--labels", "one", "--labels", "two"]
    outcome = call("fit", "probe", *labels, "--out", "gate", "--kind", "linear")
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines() if "[" in line][-2:] == ["one", "two"]
