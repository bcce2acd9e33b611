"""Fit linear probes of hidden states for the white-box figures of the policy benchmark, on a GPU.

    python policy_probes.py --work FOLDER [--device cuda]

Reads `states.npy` and `white_box*.npz`, which `policy_training.py` wrote, and writes the logits of every probe: out of
fold for train rows, by the probe of all train rows for test rows. Learning curves use subsets of the train rows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDS = 4
STRENGTHS = (3e-4, 3e-3, 3e-2)  # L2 penalty per row
CURVE = (500, 1500, 5000, 12000)


def fit_logistic(states: Any, right: Any, strength: float, steps: int = 40) -> tuple[Any, Any, Any, Any]:
    """Fit a logistic regression on standardized states; returns center, scale, weight and bias."""
    center, scale = states.mean(0), states.std(0) + 1e-6
    inputs = (states - center) / scale
    weight = torch.zeros(inputs.shape[1], device=inputs.device, requires_grad=True)
    bias = torch.zeros(1, device=inputs.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], lr=1, max_iter=steps, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        logits = inputs @ weight + bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, right) + strength * (weight**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return center, scale, weight.detach(), bias.detach()


def predict(probe: tuple[Any, Any, Any, Any], states: Any) -> Any:
    center, scale, weight, bias = probe
    return ((states - center) / scale) @ weight + bias


def fit_probe(states: Any, right: Any, folds: Any, train: Any) -> Any:
    """Return logits of all rows; rows of `train` get those of probes that did not learn from them."""
    losses = []
    for strength in STRENGTHS:  # the penalty is chosen on the first fold
        held = train & (folds == 0)
        logits = predict(
            fit_logistic(states[train & (folds != 0)], right[train & (folds != 0)], strength), states[held]
        )
        losses.append(float(torch.nn.functional.binary_cross_entropy_with_logits(logits, right[held])))
    strength = STRENGTHS[int(np.argmin(losses))]
    result = predict(fit_logistic(states[train], right[train], strength), states)
    for fold in range(FOLDS):
        held, rest = train & (folds == fold), train & (folds != fold)
        if held.any():
            result[held] = predict(fit_logistic(states[rest], right[rest], strength), states[held])
    return result


def plan_rows(folds: Any, groups: Any) -> dict[str, Any]:
    """Return the train rows of each plan: both data sets, each of them, and subsets for the learning curves."""
    is_train = folds >= 0
    plans: dict[str, Any] = {"both": is_train}
    for number, group in enumerate(("triviaqa", "nq")):
        members = is_train & (groups == number)
        plans[group] = members
        order = np.random.default_rng(7).permutation(np.flatnonzero(members.cpu().numpy()))
        for size in CURVE:
            if size < len(order):
                plans[f"{group}_{size}"] = torch.zeros_like(members)
                plans[f"{group}_{size}"][torch.from_numpy(order[:size]).to(folds.device)] = True
    return plans


def fit_probes(work: Path, device: str) -> None:
    """Wait for the labels, fit all probes and write their logits; columns that are there already are not fitted again."""
    while not (work / "closed_book.done").exists():
        time.sleep(1)
    if (work / "probes.npz").exists():
        return
    started = time.time()
    all_states = np.load(work / "states.npy", mmap_mode="r")  # rows, before/after the answer, layers, hidden
    rows = np.load(work / "white_box.npz")
    right = torch.from_numpy(rows["targets"][:, 0]).to(device)
    folds, groups = (torch.from_numpy(rows[key].astype(np.int64)).to(device) for key in ("folds", "group"))
    plans, columns = plan_rows(folds, groups), work / "probe-columns"
    columns.mkdir(exist_ok=True)
    n_layers = all_states.shape[2]
    for column in range(2 * n_layers):
        file = columns / f"{column}.npz"
        if file.exists():
            continue
        states = torch.from_numpy(np.array(all_states[:, column // n_layers, column % n_layers])).to(device).float()
        logits = {name: fit_probe(states, right, folds, train).cpu().numpy() for name, train in plans.items()}
        np.savez(file, **logits)
        print(f"probe {column + 1} of {2 * n_layers}, {time.time() - started:.0f} s", flush=True)
    collect_probes(work, plans, started)


def collect_probes(work: Path, plans: dict[str, Any], started: float) -> None:
    """Write the logits of all finished probes into one file."""
    columns = sorted((work / "probe-columns").glob("*.npz"), key=lambda file: int(file.stem))
    parts = [np.load(file) for file in columns]
    stacked = {
        f"{name}.logits": np.stack([part[name] for part in parts], 1).clip(-30, 30).astype(np.float16) for name in plans
    }
    members_of = {f"{name}.train": train.cpu().numpy() for name, train in plans.items()}
    facts = {
        "seconds": round(time.time() - started, 1),
        "strengths": STRENGTHS,
        "columns": [int(file.stem) for file in columns],
    }
    temporary = work / ".probes.npz"
    np.savez_compressed(temporary, facts=np.array(json.dumps(facts)), **stacked, **members_of)
    temporary.replace(work / "probes.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    fit_probes(options.work, options.device)


if __name__ == "__main__":
    main()
