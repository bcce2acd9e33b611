"""`label`, `history`, `eval-self` and `ask --explain`, end to end on the fake model."""

from __future__ import annotations

import json

import pytest

from knowgate.cli.main import run
from knowgate.retrieval.embeddings import SentenceEmbedder
from tests.support.hash_embedder import HashEmbedder

TOWNS = ["Paris", "Lima", "Oslo", "Rome", "Cairo", "Quito", "Bern", "Accra"]


@pytest.fixture(autouse=True)
def light_embedding(monkeypatch):
    """The log's embedding without its weights: what is under test here are the commands."""
    monkeypatch.setattr(SentenceEmbedder, "fingerprint", "hash")
    monkeypatch.setattr(SentenceEmbedder, "embed", lambda self, texts: HashEmbedder().embed(texts))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with questions and a fake model that knows every other answer."""
    monkeypatch.chdir(tmp_path)
    table, records = {}, []
    for number, town in enumerate(TOWNS):
        question = f"What is the capital of land {number}?"
        said = town if number % 2 else "nowhere"
        table[question] = {"closed": said, "open": town, "known": bool(number % 2), "samples": [said, said]}
        contexts = [{"id": "p", "text": f"It is {town}."}]
        records.append({"id": f"q{number}", "question": question, "answers": [town], "contexts": contexts})
    (tmp_path / "table.json").write_text(json.dumps(table))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


LABEL = ["label", "--data", "jsonl:data.jsonl", "--model", "fake:table.json", "--samples", "2", "--out", "R"]


def test_label_prints_the_number_of_questions(place, capsys):
    assert run(LABEL) == 0
    assert "8 of 8 questions in R" in capsys.readouterr().err
    assert len((place / "R" / "labels.jsonl").read_text().splitlines()) == 8


def test_other_settings_are_rejected_in_a_sentence(place, capsys):
    run(LABEL)
    capsys.readouterr()
    assert run([*LABEL, "--seed", "5"]) == 1
    assert "seed was 0, now 5" in capsys.readouterr().err


def test_closed_book_makes_no_open_book_answers(place):
    assert run([*LABEL, "--closed-book"]) == 0
    assert all("open" not in json.loads(line) for line in (place / "R" / "labels.jsonl").read_text().splitlines())


def test_kb_sat_is_written(place):
    assert run([*LABEL, "--kb-sat", "sat.jsonl"]) == 0
    known = [json.loads(line)["meta"]["known"] for line in (place / "sat.jsonl").read_text().splitlines()]
    assert sorted(known) == [False] * 4 + [True] * 4
    assert (place / "sat.swapped.jsonl").is_file()
    assert (place / "sat.rare.jsonl").is_file()


def test_an_unknown_layer_is_rejected(place, capsys):
    assert run([*LABEL, "--layers", "top"]) == 1
    assert "--layers 'top' does not name a layer. Use layer numbers, mid, late, last or none" in capsys.readouterr().err


def test_a_judge_without_a_model_is_rejected(place, capsys):
    assert run([*LABEL, "--grade", "judge"]) == 1
    assert "judge (needs --judge)" in capsys.readouterr().err


def test_duplicate_ids_are_rejected(place, capsys):
    text = (place / "data.jsonl").read_text()
    (place / "data.jsonl").write_text(text + text.splitlines()[0] + "\n")
    assert run(LABEL) == 1
    assert "have the same id 'q0'" in capsys.readouterr().err


@pytest.fixture
def logged(place):
    run(LABEL)
    assert run(["history", "import", "R", "--history", "log.db"]) == 0
    return place


def test_a_run_is_imported_listed_and_counted(logged, capsys):
    capsys.readouterr()
    assert run(["history", "list", "--history", "log.db", "--json"]) == 0
    labels = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    assert sorted(labels) == ["known"] * 4 + ["unknown"] * 4
    assert run(["history", "stats", "--history", "log.db"]) == 0
    assert "gold 8" in capsys.readouterr().out


def test_an_exported_log_can_be_imported(logged, capsys):
    capsys.readouterr()
    run(["history", "export", "--history", "log.db"])
    dump = capsys.readouterr().out
    (logged / "dump.jsonl").write_text(dump)
    assert run(["history", "import", "dump.jsonl", "--history", "other.db"]) == 0
    run(["history", "export", "--history", "other.db"])
    strip = [{k: v for k, v in json.loads(x).items() if k != "id"} for x in capsys.readouterr().out.splitlines()]
    before = [{k: v for k, v in json.loads(x).items() if k != "id"} for x in dump.splitlines()]
    assert sorted(strip, key=str) == sorted(before, key=str)


def test_a_question_is_added_found_and_deleted(logged, capsys):
    assert run(["history", "add", "Who is Zorro?", "--label", "known", "--history", "log.db"]) == 0
    capsys.readouterr()
    run(["history", "search", "Zorro", "--history", "log.db", "--k", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["question"] == "Who is Zorro?"
    assert run(["history", "forget", "--contains", "zorro", "--history", "log.db"]) == 0
    assert "1 entries deleted" in capsys.readouterr().err


def labels_of(capsys, log):
    capsys.readouterr()
    run(["history", "list", "--history", log, "--json"])
    return [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]


def test_time_sensitive_questions_of_a_data_set_are_logged_beside_a_run(logged, capsys):
    records = [{"question": f"Who leads {i} now?", "meta": {"time_sensitive": i < 2}} for i in range(3)]
    (logged / "time.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run(["history", "import", "R", "--time-sensitive", "jsonl:time.jsonl", "--history", "log.db"]) == 0
    assert labels_of(capsys, "log.db").count("time-sensitive") == 2
    assert run(["history", "import", "R", "--time-sensitive", "jsonl:data.jsonl", "--history", "log.db"]) == 1
    assert "no question of jsonl:data.jsonl is time-sensitive" in capsys.readouterr().err


def test_the_rule_of_the_paper_can_be_chosen(place, capsys):
    table = json.loads((place / "table.json").read_text())
    table["What is the capital of land 1?"]["samples"] = ["Lima", "nowhere"]
    (place / "table.json").write_text(json.dumps(table))
    run(LABEL)
    for rule, known in (("greedy", 4), ("all", 3)):
        assert run(["history", "import", "R", "--history", f"{rule}.db", "--rule", rule]) == 0
        assert labels_of(capsys, f"{rule}.db").count("known") == known


def test_a_new_chinese_log_recommends_the_chinese_embedding(place, capsys, caplog):
    entry = {"question": "谁写了红楼梦?", "label": "known", "model": "m", "prompts": "p"}
    (place / "zh.jsonl").write_text(json.dumps(entry) + "\n")
    assert run(["history", "import", "zh.jsonl", "--history", "zh.db"]) == 0
    assert "--embedder m3e" in capsys.readouterr().err + caplog.text


def test_a_log_grows_with_what_is_asked(place, capsys):
    (place / "docs").mkdir()
    (place / "docs" / "a.txt").write_text("The capital of land 0 is Paris. The capital of land 1 is Lima.")
    asked = ["What is the capital of land 0?", "What is the capital of land 1?"]
    always = ["--gate", "always", "--docs", "docs", "--model", "fake:table.json", "--log", "log.db", "--log-drafts"]
    assert run(["ask", *asked, *always]) == 0
    assert "2 of 2 questions were logged" in capsys.readouterr().err
    assert sorted(labels_of(capsys, "log.db")) == ["known", "unknown"]


def test_an_invalid_log_is_rejected_before_anything_is_generated(place, capsys):
    (place / "docs").mkdir()
    (place / "docs" / "a.txt").write_text("The capital of land 0 is Paris.")
    (place / "notes.txt").write_text("no database, but somebody's notes" * 100)
    assert run(["ask", "Who?", "--docs", "docs", "--model", "fake:table.json", "--log", "notes.txt"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, "the log notes.txt cannot be used" in shown.err) == ("", True)


def test_dhicls_tables_come_from_one_command(logged, capsys):
    capsys.readouterr()
    sweep = ["sweep", "dhicl", "--labels", "R", "--history", "log.db", "--counts", "3,5", "--words", "1/2"]
    assert run([*sweep, "--model", "fake:table.json", "--gates", "logprob:min", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("###")] == [
        "### Accuracy (retrieval rate) (Table 1)",
        "### Ablations (Table 4)",
        "### Cold start (Table 5)",
        "### Number of examples (Figure 6)",
        "### Label words (Table 6)",
    ]
    assert "| never | 50.0 % (0.0 %) | 50.0 % | – |" in out
    assert run([*sweep, "--counts", "few"]) == 1
    assert "--counts is 'few'. Give whole numbers" in capsys.readouterr().err


def test_gates_are_timed_side_by_side(logged, capsys):
    capsys.readouterr()
    timed = ["sweep", "latency", "--data", "jsonl:data.jsonl", "--model", "fake:table.json"]
    assert run([*timed, "--gates", "dhicl:log.db,k=3,prompt"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["dhicl:log.db,k=3", "prompt"]
    assert run(timed) == 1
    assert "measures how fast gates are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["list", "--history", "none.db"], "there is no log 'none.db'"),
        (["forget", "--history", "log.db"], "--contains TEXT or --id NUMBER"),
        (
            ["add", "Q?", "--label", "maybe", "--history", "log.db"],
            "label is 'maybe', not one of known, unknown, time-sensitive",
        ),
        (["import", "R", "--rule", "most", "--history", "log.db"], "it must be 'all', 'greedy' or 'majority'"),
        (["prune", "--model-fingerprint", "x", "--history", "log.db"], "give both"),
    ],
)
def test_wrong_use_of_history_is_reported(logged, capsys, arguments, sentence):
    assert run(["history", *arguments]) == 1
    assert sentence in capsys.readouterr().err
    assert not (logged / "none.db").exists()


@pytest.mark.parametrize("gate", ["dhicl:log.db,k=4", "skr:log.db,k=2"])
def test_ask_explains_a_decision_by_the_logged_questions(logged, capsys, gate):
    (logged / "docs").mkdir()
    (logged / "docs" / "a.txt").write_text("Lima is the capital of land 1.")
    ask = ["ask", "--model", "fake:table.json", "--gate", gate, "--docs", "docs", "What is the capital of land 1?"]
    assert run([*ask, "--explain"]) == 0
    assert "~ 0." in capsys.readouterr().out
    assert run([*ask, "--json"]) == 0
    near = json.loads(capsys.readouterr().out)["neighbours"]
    assert {"question", "label", "similarity"} <= set(near[0])


def test_a_log_of_another_model_is_rejected(logged, capsys):
    assert run(["decide", "--model", "fake", "--gate", "dhicl:log.db", "Why?"]) == 1
    assert "has no questions answered by model" in capsys.readouterr().err


def test_eval_self_prints_the_table_for_each_way(logged, capsys):
    run([*LABEL, "--kb-sat", "sat.jsonl"])
    capsys.readouterr()
    arguments = ["--data", "jsonl:sat.jsonl", "--model", "fake:table.json", "--words", "true/false"]
    assert run(["eval-self", *arguments, "--history", "log.db", "--k", "3", "--judge", "fake", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["method"] for row in rows] == [
        "direct",
        "+ history",
        "+ history, calibrated (paper)",
        "+ history, calibrated (code)",
        "free statement",
    ]
    assert rows[0]["accuracy"] == 1.0  # the fake model's labels follow what it knows
    assert rows[0]["predicted_known"] + rows[0]["predicted_unknown"] == rows[0]["n"] == 8


def test_eval_self_has_other_gates_beside_the_llm_and_lets_it_read_itself(logged, capsys):
    run([*LABEL, "--kb-sat", "sat.jsonl"])
    capsys.readouterr()
    arguments = ["--data", "jsonl:sat.jsonl", "--model", "fake:table.json", "--judge", "self"]
    assert run(["eval-self", *arguments, "--gates", "always,logprob:min", "--json"]) == 0
    rows = {row["method"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(rows) == ["direct", "free statement", "always", "logprob:min"]
    assert (rows["always"]["accuracy"], rows["always"]["predicted_unknown"]) == (0.5, 8)


def test_eval_self_needs_a_self_assessment_set(place, capsys):
    assert run(["eval-self", "--data", "jsonl:data.jsonl", "--model", "fake:table.json"]) == 1
    assert "no field meta.known" in capsys.readouterr().err
