"""Every option of every command that takes a number, with numbers that are none, too large or too small."""

import itertools
import json
import shutil

import pytest
import typer

from knowgate.cli.main import app, run
from tests.support.fuzz import attempt_command, tries
from tests.support.invented import write_invented

DOOR = "options"
ODD = [
    "nan", "-inf", "inf", "-1", "0", "1e999", "1.0000001", "-0.0", "1e308", "5e-324", "2.5", "", "abc", "1e3", "0x10",
    "\0", "½", "١", "1_0", " 1 ", "--", "True", "None", "9" * 30, "-" + "9" * 30, "9" * 400, "9" * 5000, "[]", "1,2",
    "\u202e1",
]  # fmt: skip


def numeric(annotation):
    return any(kind in str(annotation) for kind in ("int", "float")) and "Point" not in str(annotation)


def walk(command, path=()):
    inner = getattr(command, "commands", None)
    if not inner:
        yield path, command
        return
    for name in inner:
        yield from walk(inner[name], (*path, name))


def options():
    """(command, option) of every option that takes a number, from the tables the command line itself is made of."""
    for path, command in walk(typer.main.get_command(app)):
        for one in command.params:
            if numeric(one.type_descriptor.annotation):
                yield " ".join(path), one.opts[-1]


OPTIONS = list(options())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Tiny inputs for every command: questions, documents, an index, a label run, a gate, preferences, two logs."""
    folder = tmp_path_factory.mktemp("options")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KNOWGATE_CACHE", str(folder / "cache"))
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        patch.chdir(folder)
        made = write_invented(folder / "in", 60)
        (folder / "docs").mkdir()
        (folder / "docs" / "a.txt").write_text("The capital of Balaland is Balastad.")
        (folder / "q.jsonl").write_text(
            '{"question": "Who?", "answers": ["x"], "meta": {"known": true, "said": "x"}}\n'
        )
        prepare = [
            f"index {made.docs} --out index",
            f"label --data {made.data} --model {made.model} --index index --samples 2 --k 1 --out run",
            "fit probe --labels run --target known --out probe",
            "prefer --labels run --gate probe --out pref --index index --limit 8 --candidates 3 --model " + made.model,
            "history import run --history log.db",
        ]
        for line in prepare:
            assert run(line.split()) == 0, line
        record = {"need": 0.4, "retrieve": True, "gate": "g", "model": "m", "threshold": 0.5}
        (folder / "log.jsonl").write_text("".join(json.dumps({**record, "need": n / 9}) + "\n" for n in range(9)))
        yield Place(made)


FITTED_KINDS = ("probe", "uar", "adaptive", "question", "ik", "judge", "gain", "kbm", "fusion", "stack")


class Place:
    """The command lines that work; the option comes after."""

    def __init__(self, made):
        fit = "--labels run --out out"
        self.lines = {
            "start": f"start --yes --docs docs --model {made.model} --questions nowhere.jsonl --out out",
            "ask": f"ask Who --model {made.model} --index index --gate logprob:mean",
            "decide": f"decide Who --model {made.model} --gate logprob:mean",
            "serve": f"serve --model {made.model} --docs nowhere",
            "mcp": f"mcp --model {made.model} --docs nowhere",
            "index": "index docs --out out",
            "label": f"label --data {made.data} --model {made.model} --limit 2 --samples 1 --closed-book --out out",
            "import-answers": "import-answers --data jsonl:q.jsonl --model m --closed said --out out",
            "eval-self": f"eval-self --data jsonl:q.jsonl --model {made.model}",
            "prefer": f"prefer --labels run --gate probe --out out --index index --limit 2 --model {made.model}",
            "fit reranker": "fit reranker --pref pref --base none-such --out out",
            "calibrate": "calibrate probe --labels run",
            "eval": "eval --labels run --gates logprob:mean,probe --resamples 20 --no-html",
            "compare": "compare nowhere elsewhere",
            "eval-rerank": "eval-rerank --pref pref --rerank nowhere --out out",
            "replay": "replay log.jsonl",
            "cost": "cost log.jsonl",
            "refit": f"refit nowhere.db --docs docs --model {made.model} --out out",
            "keys add": "keys add somebody --keys out/keys.json",
            "sweep ik": "sweep ik --labels run --tokens 0 --base none-such",
            "sweep dhicl": "sweep dhicl --labels run --history log.db",
            "sweep latency": f"sweep latency --data {made.data} --gates logprob:mean --model {made.model} --limit 2",
            "demo": "demo --model fake --limit 1 --search-seconds 0",
            "history add": "history add Who --label known --history log.db",
            "history list": "history list --history log.db",
            "history search": "history search Who --history log.db",
            "history forget": "history forget --history log.db",
            "history copy": "history copy log.db copy.db",
            "fit arbiter": f"fit arbiter {fit}",
            **{f"fit {kind}": f"fit {kind} {fit}" for kind in FITTED_KINDS},
        }


def test_every_command_with_a_number_has_a_line_here(place):
    assert {command for command, _ in OPTIONS} <= set(place.lines)


# A number of workers that is valid starts as many processes, each of which reports the missing documents: too slow here.
TRIED_OPTIONS = [option for option in OPTIONS if option != ("serve", "--workers")]
CASES = list(itertools.product(TRIED_OPTIONS, ODD))[:: tries(67, 4)]


@pytest.mark.parametrize(("option", "value"), CASES, ids=[f"{c} {o} {v[:12]!a}" for (c, o), v in CASES])
def test_an_odd_number_is_refused_in_a_sentence_or_means_what_it_says(place, option, value, capsys):
    command, name = option
    attempt_command(
        DOOR,
        f"numbers to `{command.split()[0]}`",
        [*place.lines[command].split(), name, value],
        lambda: capsys.readouterr().err,
    )
    shutil.rmtree("out", ignore_errors=True)
