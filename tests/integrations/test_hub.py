"""Fitted things pushed and pulled: between folders, and by a hub that is a folder."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from knowgate.cli.main import run
from knowgate.core.artifacts import compute_digests
from knowgate.errors import AdapterError, ArtifactError, BadSetting, MissingExtra
from knowgate.gates import PACKAGED_GATES, load_gate
from knowgate.gates.artifacts.gate_folder import REFERENCE_FILE
from knowgate.integrations.hub import pull_artifact, push_artifact
from knowgate.training.gate import fit
from tests.support.planted_run import planted_rows, write_run
from tools.structure import ROOT

GATE = PACKAGED_GATES / "smollm"
RERANKER = ROOT / "tests" / "fixtures" / "old" / "reranker"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stands for huggingface_hub: repositories are folders."""
    home = tmp_path / "hub"

    class HfApi:
        def create_repo(self, name, private, exist_ok):
            (home / name).mkdir(parents=True, exist_ok=exist_ok)
            made.append((name, private))

        def upload_folder(self, repo_id, folder_path, commit_message, ignore_patterns):
            left_out = shutil.ignore_patterns(*ignore_patterns)
            shutil.copytree(folder_path, home / repo_id, dirs_exist_ok=True, ignore=left_out)
            (home / repo_id / ".gitattributes").write_text("lfs")

    def snapshot_download(name, revision, local_dir):
        if not (home / name).is_dir():
            raise FileNotFoundError(f"404: no repository {name}")
        shutil.copytree(home / name, local_dir, dirs_exist_ok=True)

    made = []
    module = SimpleNamespace(HfApi=HfApi, snapshot_download=snapshot_download, made=made, home=home)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


@pytest.mark.parametrize("folder", [GATE, RERANKER], ids=["gate", "reranker"])
def test_an_artifact_survives_a_shared_folder_unchanged(tmp_path, folder):
    push_artifact(folder, str(tmp_path / "share"))
    back = pull_artifact(str(tmp_path / "share"), tmp_path / "mine")
    assert compute_digests(back) == compute_digests(folder)


def test_an_artifact_survives_the_hub_unchanged_and_private(tmp_path, hub):
    assert push_artifact(GATE, "hf:acme/faq-gate") == "hf:acme/faq-gate"
    back = pull_artifact("hf:acme/faq-gate", tmp_path / "mine")
    assert compute_digests(back) == compute_digests(GATE)
    assert load_gate(str(back), plug_in=True).name == load_gate(str(GATE), plug_in=True).name
    assert hub.made == [("acme/faq-gate", True)]


@pytest.mark.parametrize("target", ["hf:acme/faq-gate", "share"])
def test_training_questions_are_only_shared_on_request(tmp_path, hub, target):
    mine = tmp_path / "gate"
    fit("probe", write_run(tmp_path / "run", *planted_rows(80)), out=mine, target="known", kind="linear")
    where = target if target.startswith("hf:") else str(tmp_path / target)
    push_artifact(mine, where)
    assert not (pull_artifact(where, tmp_path / "without") / REFERENCE_FILE).exists()
    push_artifact(mine, where, questions=True)
    assert compute_digests(pull_artifact(where, tmp_path / "with")) == compute_digests(mine)


def test_a_changed_artifact_is_an_error_and_nothing_is_written(tmp_path, hub):
    push_artifact(GATE, "hf:acme/faq-gate")
    (hub.home / "acme/faq-gate" / "weights.safetensors").write_bytes(b"other")
    with pytest.raises(ArtifactError, match="changed or damaged"):
        pull_artifact("hf:acme/faq-gate", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_code_in_a_repository_is_an_error(tmp_path, hub):
    push_artifact(GATE, "hf:acme/faq-gate")
    (hub.home / "acme/faq-gate" / "evil.pkl").write_bytes(b"x")
    with pytest.raises(ArtifactError, match="pickle"):
        pull_artifact("hf:acme/faq-gate", tmp_path / "mine")


def test_a_missing_repository_gives_the_message_of_the_hub(tmp_path, hub):
    with pytest.raises(AdapterError, match="the Hugging Face hub failed: FileNotFoundError: 404"):
        pull_artifact("hf:acme/none", tmp_path / "mine")


@pytest.mark.parametrize("name", ["hf:", "hf:name", "hf:a/b/c", "hf:../x y"])
def test_an_invalid_repository_name_is_an_error(name, hub):
    with pytest.raises(BadSetting, match="Write hf:OWNER/NAME"):
        push_artifact(GATE, name)


def test_a_folder_with_other_files_is_neither_pushed_nor_replaced(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(BadSetting, match="contains none of the files"):
        push_artifact(tmp_path / "other", str(tmp_path / "share"))
    with pytest.raises(ArtifactError, match=r"already has other content"):
        pull_artifact(str(GATE), tmp_path / "other")
    assert (tmp_path / "other" / "letter.txt").read_text() == "dear"


def test_a_missing_hub_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"knowgate\[hub\]"):
        push_artifact(GATE, "hf:acme/faq-gate")


def test_the_commands_push_and_pull(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["push", str(GATE), "share"]) == 0
    assert run(["pull", "share", "--out", "mine"]) == 0
    assert "Use it: --gate mine" in " ".join(capsys.readouterr().err.split())
    assert compute_digests(Path("mine")) == compute_digests(GATE)
    assert run(["pull", "nowhere", "--out", "mine"]) == 1
