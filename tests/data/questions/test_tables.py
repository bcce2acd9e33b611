"""CSV and Parquet files of questions."""

import pytest

from knowgate.cli.main import run
from knowgate.data.questions import guess_data_spec, load_questions
from knowgate.data.runs.folder import open_run
from knowgate.errors import BadInput, BadSetting

TEXT = """nr;q;gold;alone;searched
7;Who wrote Emma?;Austen|Jane Austen;Jane Austen;Jane Austen
8;"Capital; of Peru?";Lima;Cusco;Lima
"""


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "asked.csv"
    file.write_text(TEXT, encoding="utf-8")
    return file


def test_columns_are_named_in_the_spec_and_others_go_into_meta(table):
    one, two = load_questions(f"csv:{table}?question=q&answers=gold&id=nr&split=%7C")
    assert (one.text, one.id, one.answers) == ("Who wrote Emma?", "7", ("Austen", "Jane Austen"))
    assert (two.text, two.answers) == ("Capital; of Peru?", ("Lima",))
    assert two.meta["alone"] == "Cusco"


def test_a_label_run_is_imported_from_a_table(table, tmp_path):
    data = f"csv:{table}?question=q&answers=gold&id=nr&split=%7C"
    line = ["import-answers", "--data", data, "--model", "gpt", "--closed", "alone", "--open", "searched"]
    assert run([*line, "--out", str(tmp_path / "run")]) == 0
    rows = list(open_run(tmp_path / "run").rows())
    assert [(row.closed.correct, row.open.correct) for row in rows] == [(True, True), (False, True)]


def test_a_json_list_in_a_cell_is_parsed(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('question,answers\nWho?,"[""Ada"", ""Bob""]"\n', encoding="utf-8")
    assert load_questions(f"csv:{file}")[0].answers == ("Ada", "Bob")


def test_parquet_is_read_like_csv(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    rows = pa.table({"q": ["Who?", "Where?"], "gold": [["Ada"], ["Here", "There"]], "said": ["Ada", "Up"]})
    parquet.write_table(rows, tmp_path / "a.parquet")
    one, two = load_questions(f"parquet:{tmp_path / 'a.parquet'}?question=q&answers=gold")
    assert (one.answers, two.answers, two.meta["said"]) == (("Ada",), ("Here", "There"), "Up")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(BadInput, match="cannot be read as Parquet"):
        load_questions(f"parquet:{tmp_path / 'b.parquet'}")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "a,b\n1,2\n",
            "",
            r"has no field named question or .* Its fields are: a, b. Name the field .*: \?question=FIELD",
        ),
        ("question\na,b,c\n", "", "more cells than the header"),
        ('question\n"a', "", "is not a CSV file"),
        ("question\n", "", "holds no questions"),
    ],
)
def test_an_invalid_table_is_reported(tmp_path, text, options, said):
    file = tmp_path / "a.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=said):
        load_questions(f"csv:{file}{options}")


def test_invalid_bytes_are_reported(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"question\n\xff\xfe\n")
    with pytest.raises(BadInput, match="UTF-8"):
        load_questions(f"csv:{tmp_path / 'a.csv'}")


@pytest.mark.parametrize(("options", "said"), [("?colour=1", "Known options"), ("?sep=ab", "a single character")])
def test_invalid_options_are_rejected(table, options, said):
    with pytest.raises(BadSetting, match=said):
        load_questions(f"csv:{table}{options}")


def test_a_table_is_recognized_by_its_suffix(table):
    assert guess_data_spec(str(table)) == f"csv:{table}"
