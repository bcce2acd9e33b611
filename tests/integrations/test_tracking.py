"""Evaluations in MLflow and Weights & Biases, as installed, on this machine alone."""

import sys

import pytest

from knowgate.cli.main import run
from knowgate.errors import MissingExtra
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.integrations.experiment_trackers import collect_metrics, collect_parameters, log_to_mlflow, log_to_wandb
from tests.support.planted_run import planted_row, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rows = [planted_row(str(i), i % 2 == 0, 0.1 * (i % 7)) for i in range(40)]
    return write_run(tmp_path_factory.mktemp("tracking") / "run", rows)


@pytest.fixture(scope="module")
def evaluation(folder):
    return evaluate(["random:rate=0.5,seed=1", "always"], [folder], resamples=20)


def test_metrics_are_named_by_gate_and_measure(evaluation):
    metrics = collect_metrics(evaluation)
    gate = evaluation.gate("random:rate=0.5,seed=1")
    assert metrics["random_rate_0.5_seed_1/auroc"] == gate.measures["auroc"].value
    assert metrics["random_rate_0.5_seed_1/auroc_low"] == gate.measures["auroc"].low
    assert not [key for key in metrics if ":" in key or "," in key]
    assert collect_parameters(evaluation)["questions"] == "40"


def test_an_mlflow_run_contains_the_metrics(evaluation, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    kept = mlflow.get_run(log_to_mlflow(evaluation)).data
    assert kept.metrics == pytest.approx(collect_metrics(evaluation))
    assert kept.params["questions"] == "40"


def test_a_wandb_run_contains_the_metrics(evaluation, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    kept = {}
    inner = wandb.sdk.wandb_summary.Summary.update
    monkeypatch.setattr(wandb.sdk.wandb_summary.Summary, "update", lambda self, d: (kept.update(d), inner(self, d)))
    assert log_to_wandb(evaluation)
    assert kept == collect_metrics(evaluation)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize(("module", "log"), [("mlflow", log_to_mlflow), ("wandb", log_to_wandb)])
def test_a_missing_tracker_names_the_extra(module, log, evaluation, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"knowgate\[{module}\]"):
        log(evaluation)


def test_the_eval_command_logs_to_mlflow_with_a_flag(folder, tmp_path, monkeypatch, capsys):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    assert run(["eval", "--labels", str(folder), "--gates", "always", "--resamples", "5", "--mlflow"]) == 0
    assert "Logged to MLflow as run" in " ".join(capsys.readouterr().err.split())
