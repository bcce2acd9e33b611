"""Log evaluations to MLflow (extra `mlflow`) and Weights & Biases (extra `wandb`).

Each evaluation becomes one run. The run has one metric for each gate and measure, and the settings as parameters. The
environment variables of MLflow and Weights & Biases determine where runs are stored.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

from knowgate.core import VERSION
from knowgate.core.frameworks import wrap_errors
from knowgate.errors import require_extra
from knowgate.evaluation.gate_comparison import Evaluation

DEFAULT_PROJECT = "knowgate"
FORBIDDEN_CHARACTERS = re.compile(r"[^\w./ -]")  # MLflow rejects these characters in the names of metrics
MAX_NAME_CHARS = 250  # MLflow's limit for names


def collect_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation, such as `never/accuracy`.

    Bounds are named `never/accuracy_low` and `never/accuracy_high`.
    """
    metrics: dict[str, float] = {}
    for gate in evaluation.gates:
        for name, measure in gate.measures.items():
            key = FORBIDDEN_CHARACTERS.sub("_", f"{gate.gate}/{name}")[:MAX_NAME_CHARS]
            values = {"": measure.value, "_low": measure.low, "_high": measure.high}
            metrics |= {key + suffix: float(value) for suffix, value in values.items() if value is not None}
    return metrics


def collect_parameters(evaluation: Evaluation) -> dict[str, str]:
    """Return the parameters of an evaluation, such as version, data and model."""
    table = evaluation.table
    parameters = {"knowgate": VERSION, "questions": len(table.rows), "runs": ", ".join(map(str, table.runs))}
    parameters |= {name: table.settings.get(name) for name in ("model", "retriever", "grader", "data")}
    return {name: str(value)[:MAX_NAME_CHARS] for name, value in parameters.items() if value is not None}


def log_to_mlflow(evaluation: Evaluation, name: str = DEFAULT_PROJECT) -> str:
    """Log an evaluation to MLflow.

    The environment variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME determine the server and the experiment.

    Args:
        evaluation: The evaluation.
        name: The name of the run.

    Returns:
        The id of the run.
    """
    mlflow = import_tracker("mlflow")
    with wrap_errors("MLflow"):
        with mlflow.start_run(run_name=name) as run:
            mlflow.log_params(collect_parameters(evaluation))
            mlflow.log_metrics(collect_metrics(evaluation))
        return str(run.info.run_id)


def log_to_wandb(evaluation: Evaluation, name: str = DEFAULT_PROJECT) -> str:
    """Log an evaluation to Weights & Biases.

    Args:
        evaluation: The evaluation.
        name: The project, unless the environment variable WANDB_PROJECT names another one.

    Returns:
        The name of the run.
    """
    wandb = import_tracker("wandb")
    with wrap_errors("Weights & Biases"):
        run = wandb.init(project=os.environ.get("WANDB_PROJECT") or name, config=collect_parameters(evaluation))
        run.summary.update(collect_metrics(evaluation))
        run.finish()
        return str(run.name or run.id)


def import_tracker(name: str) -> Any:
    """Import `mlflow` or `wandb`; raise MissingExtra if it is not installed."""
    with require_extra(f"logging evaluations to {name}", name):
        return importlib.import_module(name)
