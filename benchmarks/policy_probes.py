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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    while not (options.work / "closed_book.done").exists():
        time.sleep(1)
    started = time.time()
    all_states = np.load(options.work / "states.npy", mmap_mode="r")  # rows, before/after the answer, layers, hidden
    rows = np.load(options.work / "white_box.npz")
    device = options.device
    right = torch.from_numpy(rows["targets"][:, 0]).to(device)
    folds = torch.from_numpy(rows["folds"].astype(np.int64)).to(device)
    groups = torch.from_numpy(rows["group"].astype(np.int64)).to(device)
    is_train = folds >= 0
    plans: dict[str, Any] = {"both": is_train}
    for number, group in enumerate(("triviaqa", "nq")):
        members = is_train & (groups == number)
        plans[group] = members
        order = np.random.default_rng(7).permutation(np.flatnonzero(members.cpu().numpy()))
        for size in CURVE:
            if size < len(order):
                plans[f"{group}_{size}"] = torch.zeros_like(members)
                plans[f"{group}_{size}"][torch.from_numpy(order[:size]).to(device)] = True
    logits = {name: np.zeros((len(right), 2 * all_states.shape[2]), np.float32) for name in plans}
    for position in range(2):
        for layer in range(all_states.shape[2]):
            states = torch.from_numpy(np.array(all_states[:, position, layer])).to(device).float()
            for name, train in plans.items():
                column = position * all_states.shape[2] + layer
                logits[name][:, column] = fit_probe(states, right, folds, train).cpu().numpy()
        print(f"probes {position} {time.time() - started:.0f} s", flush=True)
    members_of = {name: train.cpu().numpy() for name, train in plans.items()}
    facts = np.array(json.dumps({"seconds": round(time.time() - started, 1), "strengths": STRENGTHS}))
    both = {f"{name}.logits": value.astype(np.float16) for name, value in logits.items()}
    both |= {f"{name}.train": value for name, value in members_of.items()}
    np.savez_compressed(options.work / "probes.npz", facts=facts, **both)
    (options.work / "probes.done").write_text("done")


if __name__ == "__main__":
    main()
