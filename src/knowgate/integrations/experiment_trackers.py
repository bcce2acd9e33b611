"""Evaluations in MLflow (extra `mlflow`) and Weights & Biases (extra `wandb`): one run each, a metric for each gate and
measure, the settings as parameters. Where they go is said by each tool's own variables."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

from knowgate.core import VERSION
from knowgate.core.frameworks import wrap_errors
from knowgate.errors import MissingExtra
from knowgate.evaluation.gate_comparison import Evaluation

DEFAULT_PROJECT = "knowgate"
FORBIDDEN_CHARACTERS = re.compile(r"[^\w./ -]")
MAX_NAME_LENGTH = 250  # characters of a parameter or name


def collect_metrics(evaluation: Evaluation) -> dict[str, float]:
    """`GATE/measure`, with `_low` and `_high` where there is an interval; characters no tool takes are underscores."""
    found: dict[str, float] = {}
    for gate in evaluation.gates:
        for name, measured in gate.measures.items():
            numbers = {"": measured.value, "_low": measured.low, "_high": measured.high}
            key = FORBIDDEN_CHARACTERS.sub("_", f"{gate.gate}/{name}")[:MAX_NAME_LENGTH]
            found |= {key + end: float(number) for end, number in numbers.items() if number is not None}
    return found


def collect_parameters(evaluation: Evaluation) -> dict[str, str]:
    table = evaluation.table
    about = {"knowgate": VERSION, "questions": len(table.rows), "runs": ", ".join(map(str, table.runs))}
    about |= {name: table.settings.get(name) for name in ("model", "retriever", "grader", "data")}
    return {name: str(value)[:MAX_NAME_LENGTH] for name, value in about.items() if value is not None}


def check_trackers(*, mlflow: bool = False, wandb: bool = False) -> None:
    """Refuse a tracker that is not installed before the work, not after it."""
    for asked, name in ((mlflow, "mlflow"), (wandb, "wandb")):
        if asked:
            _imported(name, name)


def log_to_mlflow(evaluation: Evaluation, name: str = DEFAULT_PROJECT) -> str:
    """The id of a new run in MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME."""
    mlflow = _imported("mlflow", "mlflow")
    with wrap_errors("MLflow"):
        with mlflow.start_run(run_name=name) as run:
            mlflow.log_params(collect_parameters(evaluation))
            mlflow.log_metrics(collect_metrics(evaluation))
        return str(run.info.run_id)


def log_to_wandb(evaluation: Evaluation, name: str = DEFAULT_PROJECT) -> str:
    """The name of a new run in WANDB_PROJECT, or in the project `name`."""
    wandb = _imported("wandb", "wandb")
    with wrap_errors("Weights & Biases"):
        run = wandb.init(project=os.environ.get("WANDB_PROJECT") or name, config=collect_parameters(evaluation))
        run.summary.update(collect_metrics(evaluation))
        run.finish()
        return str(run.name or run.id)


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingExtra(f"writing evaluations to {module}", extra) from None
