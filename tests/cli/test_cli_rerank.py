"""From labels to an aligned reranker and back into `ask`, by commands alone: a fake LLM, a tiny cross-encoder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from knowgate.cli.eval_rerank import add_base_reranker, parse_named_specs
from knowgate.cli.main import run
from knowgate.data.preferences import PreferenceFolder
from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadSetting
from knowgate.training.preference_run import measure_preferences as prefer_labelled

GOOD, BAD = "golden evidence that helps this model", "misleading nonsense that confuses the model"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(f"{GOOD} {BAD}".split())]
TABLE = ["--model", "fake:table.json"]


def write_data(folder: Path) -> None:
    """Half of the questions are known; every question has four passages of each kind, one of them twice."""
    table = {GOOD: {"closed": "right", "known": True}, BAD: {"closed": "wrong", "known": False}}
    lines = []
    for place in range(80):
        question, known = f"riddle {place}x?", place % 2 == 0
        table[question] = {"closed": "right" if known else "wrong", "known": known}
        texts = [f"p{place} {i} {GOOD if i % 2 else BAD}" for i in range(8)]
        contexts = [{"id": f"{place}.{i}", "text": text, "score": 9 - i} for i, text in enumerate([*texts, texts[0]])]
        lines.append({"id": f"r{place}", "question": question, "answers": ["right"], "contexts": contexts})
    (folder / "table.json").write_text(json.dumps(table))
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A label run and a probe, made once."""
    folder = tmp_path_factory.mktemp("built")
    write_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["label", "--data", "jsonl:data.jsonl", *TABLE, "--samples", "0", "--out", "run"]) == 0
        probe = ["fit", "probe", "--labels", "run", "--target", "known", "--kind", "linear", "--out", "probe"]
        assert run(probe) == 0
    return folder


@pytest.fixture
def made(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)


def prefer(call, *options: str):
    model = [] if "--model" in options else TABLE
    return call("prefer", "--labels", "run", "--out", "pref", *model, *options)


def test_a_reranker_is_aligned_measured_and_used(call, made, tmp_path, monkeypatch):
    from tests.support.tiny_models import save_tiny_cross_encoder

    monkeypatch.setattr("knowgate.cli.progress.FIRST_LINE_SECONDS", 0.0)  # every step is a line
    done = prefer(call, "--gate", "probe", "--data", "jsonl:data.jsonl")
    assert done.code == 0, done.err
    assert "measuring: 0 of 80 questions" in done.err
    assert "Duplicate passages dropped: 80; shortened to fit the context window: 0." in done.err
    assert len(list(PreferenceFolder(tmp_path / "pref").rows())) == 80

    save_tiny_cross_encoder(tmp_path / "tiny", WORDS)
    options = ["--base", "tiny", "--batch", "4", "--learning-rate", "3e-3", "--epochs", "2"]
    fitted = call("fit", "reranker", "--pref", "pref", *options, "--out", "aligned")
    assert fitted.code == 0, fitted.err
    assert "P@1" in fitted.out
    assert "knowgate ask --rerank aligned" in fitted.err
    assert re.search(r"^alignment: 4 of \d+ questions, .* questions/s, loss ", fitted.err, flags=re.MULTILINE)
    assert re.search(r" left$", fitted.err, flags=re.MULTILINE)

    rankers = ["--rerank", "aligned", "--base", "tiny", "--rerank-margin", "0.5"]
    measured = call("eval-rerank", "--pref", "pref", *rankers, *TABLE, "--out", "e")
    assert measured.code == 0, measured.err
    found = json.loads((tmp_path / "e" / "rerank.json").read_text())
    ranked, answered = found["rankings"]["confidence"], found["answers"][0]
    assert ranked["values"]["P@1"]["aligned"]["value"] > 0.9
    assert ranked["values"]["P@1"]["oracle"]["value"] == 1.0
    assert answered["values"]["top 1"]["aligned"]["value"] > 0.9
    assert ranked["margin_share"] == 0.0
    assert "P@1" in measured.out
    kept = {path.name for path in (tmp_path / "e").iterdir()}
    assert {"report.html", "rerank.md", "predictions.jsonl", "scores.jsonl", "answers.jsonl"} <= kept

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(f"riddle {BAD}")
    (tmp_path / "docs" / "b.txt").write_text(f"riddle {GOOD}")
    cbdr = [
        "--preset",
        "cbdr",
        "--gate",
        "probe",
        "--rerank",
        "aligned",
        "--docs",
        "docs",
        "--k",
        "1",
        *TABLE,
        "--json",
    ]
    answer = call("ask", "riddle 1x?", *cbdr, "--beta", "0.9")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert (said["answer"], said["threshold"], said["passages"][0]["id"][:5]) == ("right", 0.1, "b.txt")
    skipped = call("ask", "riddle 1x?", *cbdr, "--rerank-margin", "0")
    assert "the retriever is sure" in json.loads(skipped.out)["reason"]


@pytest.mark.parametrize("source", ["benefit", "confidence"])
def test_preferences_that_were_interrupted_go_on(call, made, source, tmp_path):
    options = ["--gate", "probe", "--data", "jsonl:data.jsonl", "--source", source, "--limit", "12"]
    assert prefer(call, *options).code == 0
    whole = (tmp_path / "pref" / "preferences.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "pref" / "preferences.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:20])
    assert prefer(call, *options).code == 0
    assert (tmp_path / "pref" / "preferences.jsonl").read_bytes() == whole


def test_the_library_measures_what_the_command_does(call, made, tmp_path):
    assert prefer(call, "--data", "jsonl:data.jsonl", "--source", "benefit", "--limit", "12").code == 0
    options = {"data": "jsonl:data.jsonl", "source": "benefit", "limit": 12, "model": TABLE[1]}
    counts = prefer_labelled(RunFolder(Path("run")), "again", **options)
    assert counts.done == 12
    first, second = ((tmp_path / name / "preferences.jsonl").read_bytes() for name in ("pref", "again"))
    assert first == second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source", "confidence", "--data", "jsonl:data.jsonl"], "--gate is missing. Fit a probe with"),
        (["--gate", "logprob", "--data", "jsonl:data.jsonl"], "--gate 'logprob' is not one"),
        (["--gate", "probe", "--source", "wish"], "--source 'wish' is not allowed"),
        (["--gate", "probe", "--split", "all"], "--split 'all' is not allowed"),
        (["--gate", "probe", "--index", "i", "--data", "jsonl:data.jsonl"], "mutually exclusive"),
        (["--gate", "probe", "--model", "fake"], "not from fake"),
        (["--gate", "probe", "--index", "other"], "no passage was found"),
        (["--gate", "probe", "--data", "jsonl:few.jsonl"], "lacks 79 of the 80 labeled questions"),
        (["--source", "likelihood", "--data", "jsonl:data.jsonl"], "cannot score given answers"),
        (
            ["--source", "benefit", "--data", "jsonl:data.jsonl", "--cut", "9"],
            "--cut truncates passages with a local tokenizer",
        ),
    ],
)
def test_wrong_preferences_are_explained(call, made, options, message, tmp_path):
    (tmp_path / "few.jsonl").write_text((tmp_path / "data.jsonl").read_text().splitlines()[0] + "\n")
    (tmp_path / "doc").mkdir()
    (tmp_path / "doc" / "x.txt").write_text("nothing of the kind")
    assert call("index", "doc", "--out", "other").code == 0
    outcome = prefer(call, *options)
    assert (outcome.code, message in outcome.err) == (1, True), outcome.err


def test_a_probe_of_another_model_is_rejected(call, made, tmp_path):
    (tmp_path / "table2.json").write_text((tmp_path / "table.json").read_text().replace("wrong", "false"))
    model = ["--model", "fake:table2.json"]
    assert call("label", "--data", "jsonl:data.jsonl", *model, "--samples", "0", "--out", "run2").code == 0
    outcome = call(
        "prefer", "--labels", "run2", "--gate", "probe", *model, "--data", "jsonl:data.jsonl", "--out", "pref2"
    )
    assert outcome.code == 1
    assert "was fitted on" in outcome.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["fit", "reranker", "--out", "x"], "Give --pref PREF"),
        (["fit", "probe", "--out", "x"], "Set --labels to folders of"),
        (["fit", "reranker", "--pref", "nothing", "--out", "x"], "is not a preference folder"),
        (["eval-rerank", "--pref", "nothing", "--rerank", "r", "--out", "x"], "is not a preference folder"),
        (["fit", "reranker", "--relevance", "jsonl:empty.jsonl", "--out", "x"], "empty.jsonl"),
        (["eval", "--labels", "run", "--rerank", "r"], "--rerank cannot be used with"),
        (
            ["ask", "q", "--gate", "never", "--beta", "0.9", "--model", "fake"],
            "--beta has an effect only with --preset 'cbdr'",
        ),
        (
            ["ask", "q", "--gate", "never", "--preset", "x", "--model", "fake"],
            "--preset 'x' is unknown. Use one of: cbdr.",
        ),
        (["ask", "q", "--gate", "never", "--preset", "cbdr", "--model", "fake"], "Fit a probe: fit('probe'"),
    ],
)
def test_wrong_commands_are_explained(call, command, message):
    outcome = call(*command)
    assert (outcome.code, message in outcome.err) == (1, True), outcome.err


def test_the_preset_takes_an_aligned_reranker_and_one_threshold(call, made, tmp_path):
    cbdr = ["ask", "riddle 1x?", "--preset", "cbdr", "--gate", "probe", "--docs", "docs", *TABLE]
    (tmp_path / "docs").mkdir()
    assert "--rerank is missing. Make one: `knowgate fit reranker`" in call(*cbdr).err
    assert "--rerank 'docs' is not one" in call(*cbdr, "--rerank", "docs").err
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "reranker.json").write_text("{}")
    twice = call(*cbdr, "--rerank", "r", "--beta", "0.9", "--threshold", "0.2")
    assert "--beta and --threshold (which is 1 - beta) are mutually exclusive" in twice.err
    (tmp_path / "docs" / "a.txt").write_text("text")
    assert "is damaged" in call(*cbdr, "--rerank", "r").err


def test_rerankers_are_named_by_folder_or_explicitly():
    assert parse_named_specs(["runs/aligned", "mine=runs/aligned", "api:m@https://host/rerank"]) == {
        "aligned": "runs/aligned", "mine": "runs/aligned", "rerank": "api:m@https://host/rerank",
    }  # fmt: skip
    with pytest.raises(BadSetting, match="--rerank one=a/r --rerank two=b/r"):
        parse_named_specs(["a/r", "b/r"])


def test_the_given_or_stored_base_comes_first(tmp_path):
    (tmp_path / "aligned" / "base").mkdir(parents=True)
    spec = str(tmp_path / "aligned")
    assert next(iter(add_base_reranker({"aligned": spec}, None).items())) == ("base", f"{spec}/base")
    assert add_base_reranker({"aligned": spec}, "other")["base"] == "other"
    assert list(add_base_reranker({"aligned": spec, "base": "mine"}, None)) == ["base", "aligned"]


def test_label_and_eval_take_a_reranker(call, made, tmp_path):
    from tests.support.tiny_models import save_tiny_cross_encoder

    save_tiny_cross_encoder(tmp_path / "tiny", WORDS)
    reranked = ["--data", "jsonl:data.jsonl", *TABLE, "--rerank", "tiny", "--candidates", "8", "--k", "1"]
    done = call("label", *reranked, "--samples", "0", "--limit", "9", "--out", "again")
    assert done.code == 0, done.err
    assert RunFolder(tmp_path / "again").settings()["reranker"] == "cross-encoder:tiny"
    assert {len(row.passages) for row in RunFolder(tmp_path / "again").rows()} == {1}
    done = call("eval", *reranked, "--limit", "9", "--gates", "logprob", "--no-html", "--out", "e")
    assert done.code == 0, done.err
    assert RunFolder(tmp_path / "e" / "runs" / "jsonl-data.jsonl").settings()["candidates"] == 8
    table = call("sweep", "beta", "--labels", "run", "--labels", "again", "--gates", "logprob")
    assert (table.code, "have different questions" in table.err) == (1, True)
    assert call("label", *reranked, "--samples", "0", "--out", "all").code == 0
    table = call("sweep", "beta", "--labels", "run", "--labels", "all", "--gates", "logprob")
    assert (table.code, "accuracy (retrieval rate) by beta, 80 questions" in table.out) == (0, True), table.err


def test_a_reranker_can_be_trained_on_relevance_alone(call, made, tmp_path):
    from tests.support.tiny_models import save_tiny_cross_encoder

    save_tiny_cross_encoder(tmp_path / "tiny", WORDS)
    contexts = [{"id": "g", "text": GOOD}, {"id": "b", "text": BAD}]
    riddle = {"question": "riddle?", "answers": ["golden"], "contexts": contexts}
    lines = [json.dumps({"id": f"r{place}", **riddle}) for place in range(9)]
    (tmp_path / "gold.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "doc").mkdir()
    (tmp_path / "doc" / "x.txt").write_text(f"riddle {BAD}")
    assert call("index", "doc", "--out", "idx").code == 0
    options = ["--relevance", "jsonl:gold.jsonl", "--relevance", "jsonl:gold.jsonl", "--relevance-index", "idx"]
    done = call("fit", "reranker", *options, "--base", "tiny", "--epochs", "1", "--out", "plain")
    assert done.code == 0, done.err
    assert "Trained on the relevance of 18 questions" in done.err
    assert json.loads((tmp_path / "plain" / "relevance.json").read_text())["training"]["epochs"] == 1


def test_without_test_questions_the_fit_says_what_the_dev_questions_say(call, made, tmp_path, monkeypatch):
    from tests.support.tiny_models import save_tiny_cross_encoder

    monkeypatch.setattr("knowgate.training.reranker.MIN_DEV_QUESTIONS", 3)
    assert prefer(call, "--source", "benefit", "--split", "train", "--data", "jsonl:data.jsonl").code == 0
    assert not {row.split for row in PreferenceFolder(tmp_path / "pref").rows()} - {"train"}
    save_tiny_cross_encoder(tmp_path / "tiny", WORDS)
    options = ["--base", "tiny", "--batch", "4", "--learning-rate", "3e-3", "--epochs", "2"]
    fitted = call("fit", "reranker", "--pref", "pref", *options, "--out", "aligned")
    assert fitted.code == 0, fitted.err
    assert "so the reranker was not measured on any" in fitted.err
    assert "knowgate eval-rerank" in fitted.err
    assert re.search(r"P@1 of \d+ dev questions: 0\.\d+ to 1\.000", fitted.err), fitted.err
