"""Labeling on a real Ray cluster of two local machines: every question has one row, even if workers die."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from knowgate.data.preferences import PreferenceFolder
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import read_needs
from knowgate.errors import BadSetting, MissingExtra, ServerError
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.labels import ray_cluster
from knowgate.labels.labeler import Labeler
from knowgate.labels.labeling import LabelJobSpec, label
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.options import LabelOptions
from knowgate.labels.ray_cluster import ClusterNode, RayCluster, WorkerResources, plan_workers
from knowgate.labels.ray_runner import RayRunner
from knowgate.labels.run import run_labeling
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.training.preference_run import measure_preferences
from knowgate.types import Passage, Question
from tests.support.processes import python
from tests.support.troubled_recipe import BROKEN, POISON, Trouble

SMALL = LocalRunner(first=4, largest=4)


def questions(n=16):
    return [
        Question(
            f"What is word{i} of the list?", f"q{i}", (f"word{i}",), contexts=(Passage(f"p{i}", f"It is word{i}."),)
        )
        for i in range(n)
    ]


# --- what a spec means ----------------------------------------------------------------------------


def test_a_spec_names_the_cluster_and_what_each_worker_gets():
    assert RayCluster.from_spec("ray") == RayCluster("auto", WorkerResources())
    assert RayCluster.from_spec("ray:local?workers=2") == RayCluster("local", WorkerResources(workers=2))
    assert RayCluster.from_spec("ray:10.0.0.5:6379?workers=8&gpus=0.5") == RayCluster(
        "10.0.0.5:6379", WorkerResources(8, 0.5)
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("spark", "unknown runner 'spark'. Use local, ray"),
        ("ray:nowhere", "Write ray:HOST:PORT"),
        ("ray:local?hands=2", "unknown option 'hands'. Known options: workers, gpus, cpus"),
        ("ray:local?workers=-1", "workers"),
        ("ray:local?gpus=many", "must be a number"),
    ],
)
def test_an_invalid_spec_is_rejected_before_anything_is_loaded(spec, said, tmp_path):
    with pytest.raises(BadSetting, match=said.replace("?", r"\?")):
        label(questions(1), model="fake", out=tmp_path / "run", runner=spec)
    assert not (tmp_path / "run").exists()


def test_workers_take_a_gpu_each_or_the_cores_of_a_machine():
    gpus = [ClusterNode("a", "h1", 16, 4), ClusterNode("b", "h2", 16, 4)]
    cores = [ClusterNode("a", "h1", 8, 0), ClusterNode("b", "h2", 8, 0)]
    assert plan_workers(WorkerResources(), gpus) == WorkerResources(8, 1, 1)
    assert plan_workers(WorkerResources(gpus=0.5), gpus) == WorkerResources(16, 0.5, 1)
    assert plan_workers(WorkerResources(), cores) == WorkerResources(2, 0, 8)
    assert plan_workers(WorkerResources(workers=4), cores) == WorkerResources(4, 0, 4)
    with pytest.raises(
        BadSetting, match=r"too little for 9 workers\. Each worker needs 1 cores and 1 GPUs\. .*workers=8"
    ):
        plan_workers(WorkerResources(workers=9), gpus)


def test_a_cluster_that_does_not_answer_is_reported(tmp_path):
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=rf"no Ray cluster answers at 127.0.0.1:{port} .*ray start"):
        label(questions(1), model="fake", out=tmp_path / "run", runner=f"ray:127.0.0.1:{port}")
    assert not (tmp_path / "run").exists()


def test_a_model_object_is_rejected(tmp_path):
    from knowgate.models.fake import FakeModel

    with pytest.raises(BadSetting, match=r"cannot send a FakeModel object to other machines. Give the model as"):
        label(questions(1), model=FakeModel(), out=tmp_path / "run", runner="ray:local")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"knowgate\[ray\]"):
        ray_cluster.import_ray()


# --- a real cluster -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes():
    """Two machines, one with two cores and one with one, and this process connected to them."""
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    ray_cluster.import_ray()
    from ray.cluster_utils import Cluster as TestCluster

    few = {"prestart_worker_first_driver": False}  # processes that nobody asked for take their time
    head = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False, "_system_config": few}
    made = TestCluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=1, object_store_memory=100 << 20)
    with RayCluster(made.address).connect():
        yield made
    made.shutdown()


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    out = tmp_path_factory.mktemp("index")
    lines = [f'{{"id": "p{i}", "text": "The list has word{i} in it."}}\n' for i in range(16)]
    (out / "passages.jsonl").write_text("".join(lines))
    build_index(out / "passages.jsonl", out / "built", kind="bm25")
    return out / "built"


def labeler(index=None):
    from knowgate.labels.grading import load_grader
    from knowgate.models import load_model

    retriever = load_retriever(str(index)) if index else None
    return Labeler(
        load_model("fake"), load_grader("contains"), LabelOptions(samples=5, layers=(1, 2)), retriever=retriever
    )


def recipe(index=None):
    options = LabelOptions(samples=5, layers=(1, 2), index=str(index) if index else None)
    return LabelJobSpec("fake", options, AnswerPrompts())


def by_id(folder):
    """The rows without what differs from start to start: time, and where states lie."""
    rows = list(folder.rows())
    assert len({row.id for row in rows}) == len(rows)
    return {row.id: replace(row, seconds=0.0, vector=None) for row in rows}


def states(folder, ids):
    rows = {row.id: row for row in folder.rows()}
    return folder.vectors([rows[key] for key in sorted(ids)], "before.1")


def test_every_question_has_the_same_row_as_locally_even_if_workers_die(nodes, index, tmp_path):
    here, there = RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
    run_labeling(here, questions(), labeler(index), data="d", runner=SMALL)
    made = labeler(index)
    runner = RayRunner(
        RayCluster(nodes.address, WorkerResources(workers=3)),
        Trouble(recipe(index), str(tmp_path)),
        made.make_failed_batch,
        made.identity,
        SMALL,
    )
    tally = run_labeling(there, questions(), made, data="d", runner=runner)
    local, far = by_id(here), by_id(there)
    assert (tmp_path / "killed").exists()
    assert set(far) == set(local)
    assert tally.failed == 2
    assert "2 workers died over this question" in far[POISON].error
    assert far[BROKEN].error == "RuntimeError: an unforeseen fault"
    whole = set(far) - {POISON, BROKEN}
    assert {key: far[key] for key in whole} == {key: local[key] for key in whole}
    assert far["q0"].passages
    assert far["q0"].answer_frequency == 1
    np.testing.assert_array_equal(states(there, whole), states(here, whole))
    told = [file.read_text().split() for file in tmp_path.glob("worker-*")]
    assert len(told) > 3  # those that died had successors
    assert len({node for node, _ in told}) == 2
    assert len({(node, shelf) for node, shelf in told}) == 2  # one index on each machine


@pytest.mark.slow
def test_an_interrupted_run_continues_and_keeps_finished_rows(nodes, tmp_path):
    def stop(tally):
        if tally.done >= 4:
            raise KeyboardInterrupt

    spec = f"ray:{nodes.address}?workers=1"
    options = {"model": "fake", "samples": 2, "layers": "none", "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        label(questions(), runner=spec, on_progress=stop, **options)
    before = (tmp_path / "run" / "labels.jsonl").read_text()
    assert 4 <= len(before.splitlines()) < 16
    folder = label(questions(), runner=spec, **options)
    assert (folder.path / "labels.jsonl").read_text().startswith(before)
    plain = label(questions(), **{**options, "out": tmp_path / "plain"})
    assert by_id(folder) == by_id(plain)


class OtherVersionRay:
    """Stands for Ray on a cluster whose second machine has another version of knowgate."""

    def remote(self, **options):
        return lambda function: SimpleNamespace(
            options=lambda scheduling_strategy: SimpleNamespace(
                remote=lambda: function() if scheduling_strategy.node_id == "a" * 56 else "0.0.9"
            )
        )

    def get(self, references):
        return references


def test_a_machine_with_another_version_is_rejected_by_name():
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    machines = [ClusterNode("a" * 56, "h1", 1, 0), ClusterNode("b" * 56, "h2", 1, 0)]
    with pytest.raises(BadSetting, match=r"another version of knowgate: .*h2: 0\.0\.9\. Install version .* there"):
        ray_cluster.check_versions(OtherVersionRay(), machines)
    ray_cluster.check_versions(OtherVersionRay(), machines[:1])


@pytest.mark.slow
def test_a_machine_with_another_model_is_rejected(nodes, tmp_path):
    made = labeler()
    runner = RayRunner(
        RayCluster(nodes.address),
        recipe(),
        made.make_failed_batch,
        {**made.identity, "model": "another"},
        SMALL,
    )
    with pytest.raises(
        BadSetting, match=r"other files than this one: the fingerprint of its model is fake-\w+ instead of another"
    ):
        run_labeling(RunFolder(tmp_path / "run"), questions(2), made, data="d", runner=runner)


@pytest.mark.slow
def test_preferences_and_decisions_equal_the_local_ones(nodes, tmp_path):
    far = f"ray:{nodes.address}?workers=1"
    table = {"word1 of": {"closed": "x", "open": "word1", "when": "It is"}}
    (tmp_path / "model.json").write_text(json.dumps(table))
    model = f"fake:{tmp_path / 'model.json'}"
    asked = [
        replace(question, contexts=(*question.contexts, Passage("n", "Nothing is said here.")))
        for question in questions(8)
    ]
    run = label(asked, model=model, samples=0, layers="none", out=tmp_path / "run")
    for name, runner in (("here", None), ("there", far)):
        counts = measure_preferences(run, tmp_path / name, source="benefit", model=model, candidates=2, runner=runner)
        assert (counts.done, counts.failed) == (8, 0)
    here, there = ({row.id: row for row in PreferenceFolder(tmp_path / name).rows()} for name in ("here", "there"))
    assert there == here
    assert there["q1"].candidates[0].shift == 1

    gates = ["prompt", "logprob:mean"]
    evaluate(gates, data=asked, model=model, out=tmp_path / "eval-here", resamples=0)
    evaluate(gates, data=asked, model=model, out=tmp_path / "eval-there", resamples=0, runner=far)
    needs = [
        {item.gate: item.needs for item in read_needs(next((tmp_path / name / "runs").iterdir()))}
        for name in ("eval-here", "eval-there")
    ]
    assert set(needs[0]) == set(gates)
    assert needs[1] == needs[0]


def test_importing_label_does_not_import_ray():
    assert "ray" not in python("import sys, knowgate.labels.labeling; print(*sys.modules)").split()
