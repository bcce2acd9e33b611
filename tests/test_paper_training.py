"""Trainings of two papers: the loss, the order of the jobs, and what the tables read from a record."""

import re

import numpy as np
import pytest

from benchmarks import paper_record
from benchmarks.tables import closed_book

torch = pytest.importorskip("torch")
from benchmarks.paper_training import pack_results, plan_jobs  # noqa: E402 (needs torch)
from benchmarks.policy_training import (  # noqa: E402 (needs torch)
    Rows,
    compute_loss,
    keep_targets,
    load_checkpoint,
    save_checkpoint,
    split_batch,
    weigh_positives,
)


def test_the_loss_ignores_targets_that_are_not_known():
    logits, weights = torch.tensor([[[0.3, 2.0]], [[-1.0, -4.0]]]), torch.ones(2)
    targets = torch.tensor([[[1.0, float("nan")]], [[0.0, float("nan")]]])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits[..., 0], targets[..., 0])
    assert float(compute_loss(logits, targets, weights)) == pytest.approx(float(expected))


def test_a_batch_without_any_target_changes_nothing():
    logits, targets = torch.zeros(2, 1, 1), torch.full((2, 1, 1), float("nan"))
    assert float(compute_loss(logits, targets, torch.ones(1))) == 0


def test_a_job_learns_its_own_targets_only():
    targets = np.array([[1, 0, 1], [0, np.nan, 1]], np.float32)
    rows = Rows([np.zeros(2, np.int32)] * 2, np.zeros((2, 1)), targets, np.zeros(2))
    assert keep_targets(rows, ()) is rows
    np.testing.assert_array_equal(keep_targets(rows, (1,)).targets, [[np.nan, 0, np.nan], [np.nan] * 3])


def test_rare_positives_weigh_more_up_to_a_limit():
    targets = np.array([[1.0, 1.0, 1.0]] + [[0.0, 1.0, np.nan]] * 2 + [[0.0, 0.0, 0.0]])
    assert weigh_positives(targets, True).tolist() == pytest.approx([3.0, 1.0, 1.0])
    assert weigh_positives(targets, False).tolist() == [1.0, 1.0, 1.0]
    assert weigh_positives(np.array([[1.0], *[[0.0]] * 99]), True).tolist() == [10.0]


def train_steps(n_steps, stop_after, file):
    """Fit a line by AdamW, interrupted after some steps, and return its weights."""
    inputs = torch.linspace(-1, 1, 16)[:, None]
    first = 0
    for end in (stop_after, n_steps):
        torch.manual_seed(0)
        layer = torch.nn.Linear(1, 1)
        parameters = list(layer.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        first = load_checkpoint(file, parameters, optimizer, "cpu")
        for _ in range(first, end):
            optimizer.zero_grad()
            ((layer(inputs) - 3 * inputs) ** 2).mean().backward()
            optimizer.step()
        save_checkpoint(file, parameters, optimizer, end)
    return [first, *(value.item() for value in parameters)]


def test_a_training_continues_exactly_from_its_checkpoint(tmp_path):
    whole = train_steps(6, 6, tmp_path / "a.safetensors")
    parts = train_steps(6, 2, tmp_path / "b.safetensors")
    assert parts[0] == 2
    assert parts[1:] == whole[1:]


def test_long_batches_are_run_in_parts():
    rows = Rows([np.zeros(3000, np.int32)] * 5, *([np.zeros((5, 1))] * 3))
    assert [len(part) for part in split_batch(rows, range(5), 8000)] == [2, 2, 1]
    assert len(split_batch(Rows([np.zeros(80, np.int32)] * 32, *([np.zeros((32, 1))] * 3)), range(32), 8000)) == 1


def test_the_jobs_come_in_the_order_of_the_protocol():
    names = [job.name for job in plan_jobs()]
    assert names[:6] == ["kbm_3_epochs", "kbm_1_epoch", "ik_32_seed0", "ik_0_seed0", "ik_32_seed1", "ik_0_seed1"]
    assert len({job.file for job in plan_jobs()}) == len(names)


def test_only_ik_needs_the_closed_book_answers():
    assert {job.name.split("_")[0] for job in plan_jobs() if job.after} == {"ik"}
    kbm = {job.name: job for job in plan_jobs() if job.name.startswith("kbm30")}
    assert kbm["kbm30_3_epochs"].balanced
    assert kbm["kbm30_3_epochs"].epochs == 3
    assert not kbm["kbm30_1_epoch"].balanced
    assert kbm["kbm30_1_epoch"].epochs == 1


def test_packed_results_leave_out_what_can_be_made_again(tmp_path):
    import tarfile

    for name in ("ik_rows_32.npz", "ik_32_seed0-1.npz", "states.npy", "closed_book.done"):
        (tmp_path / name).write_bytes(b"x")
    pack_results(tmp_path, tmp_path / "results.tar")
    with tarfile.open(tmp_path / "results.tar") as archive:
        assert archive.getnames() == ["closed_book.done", "ik_32_seed0-1.npz"]


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Questions of both data sets; the fusion and the judge with 32 tokens each know half of the answers."""
    generator, rows = np.random.default_rng(0), []
    for number in range(800):
        right, noise = number % 2, generator.normal(0, 1, 3)
        half = number // 2 % 2
        signals = {"fusion": 2 * right * half + noise[0], "32/0": 2 * right * (1 - half) + noise[1], "0/0": noise[2]}
        fusion = {"stack": signals["fusion"]} | ({"all": signals["fusion"]} if number >= 400 else {})
        judges = {name: signals[name] for name in ("0/0", "32/0")}
        rows.append({"id": str(number), "group": number // 200 % 2, "test": number >= 400, "right": right,
                     "min": 0.0, "fusion": fusion, "ik": judges})  # fmt: skip
    file = tmp_path / "closed_book.jsonl.gz"
    paper_record.write_record(file, rows)
    monkeypatch.setattr(closed_book, "CLOSED_BOOK", file)


def test_the_stack_joins_what_fusion_and_judge_know(record):
    lines = {line.split("|")[1].strip(): line for line in closed_book.signal_table().splitlines()[2:]}
    values = {name: float(line.split("|")[2].split()[0]) for name, line in lines.items()}
    assert (
        values["stack of fusion and IK"]
        > max(values["fusion"], values["IK, 32 answer tokens, ensemble of 1 seeds"]) + 0.02
    )
    assert re.fullmatch(r"[+-]0\.\d{3} \[[+-]0\.\d{3}, [+-]0\.\d{3}\]", closed_book.token_difference(0))


def test_there_is_no_section_without_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(closed_book, "CLOSED_BOOK", tmp_path / "missing.jsonl.gz")
    assert list(closed_book.closed_book_tables()) == []
