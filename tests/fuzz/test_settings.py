"""Settings, prompt files and the environment: a setting that means what it says, or a sentence."""

import os
import re
import string
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.core.files import cache_dir
from knowgate.core.http_client import create_client
from knowgate.core.validation import check_integer, check_number
from knowgate.models import load_model
from knowgate.models.prompts.templates import load_packaged_templates, load_templates
from knowgate.pipeline.settings import PipelineOptions, load_settings
from knowgate.retrieval.engines.http import HttpRetriever
from knowgate.types import Prompt
from tests.support.fuzz import attempt, attempt_command, trying

DOOR = "settings"
KEYS = [*PipelineOptions.model_fields, "nosuch", "k.x", "__class__"]
NUMBERS = ["nan", "-inf", "inf", "1e999", "-1", "0", "1", "0.5", "2", "9" * 30, "9" * 5000, "0x10", "1_0", "true"]
TEXTS = [
    '""',
    '"x"',
    '"a\\u0000b"',
    '"~nosuchuser/x"',
    '"\\udfff"',
    "[" * 900 + "]" * 900,
    "1979-05-27",
    "{a = 1}",
    "'''\n'''",
]
VALUES = st.sampled_from([*NUMBERS, *TEXTS]) | st.text(alphabet='{}[]",=\\ud819.#\n', max_size=12)
FILES = st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=4).map(
    lambda rows: "\n".join(f"{k} = {v}" for k, v in rows)
)


@trying(60, 700)
@given(FILES)
def test_a_config_file_is_taken_as_it_stands_or_refused(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "knowgate.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        settings = attempt(DOOR, "config files", lambda: load_settings(path)).value
    if settings is not None:
        written = tomllib.loads(text)
        assert {key: str(getattr(settings, key)) for key in written} == {k: _read(v, k) for k, v in written.items()}
        assert settings.threshold is None or 0 <= settings.threshold <= 1
        assert 1 <= settings.k <= 10**9


def _read(value, key):
    if PipelineOptions.model_fields[key].annotation is bool:  # 0 and 1 mean false and true
        return str(bool(value))
    is_real = key in ("threshold", "beta", "rerank_margin")
    return str(float(value)) if is_real else str(int(value)) if key in ("k", "max_tokens") else str(value)


PIECES = [
    "{query}", "{evidence}", "{", "}", "{{", "}}", "{query!x}", "{query!r}", "{query:>9}", "{query:d}", "{0}", "{}",
    "{query.__class__}", "{query[0]}", "{query:{evidence}}", "{query:>999999999999}", "\n", "\0", "谁", "{ x }", "x",
]  # fmt: skip


@trying(60, 500)
@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.sampled_from(["open", "closed", "nosuch"]))
def test_a_template_is_filled_with_texts_alone_or_refused(text, key):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        escaped = text.replace("\n", "\\n").replace("\0", "\\u0000")
        path.write_text(f'[en]\n{key} = "{escaped}"\n', encoding="utf-8")
        made = attempt("prompt files", "templates at random", lambda: load_templates(path, "answer")).value
    if made is not None:
        names = {
            name
            for _, name, _, _ in string.Formatter().parse(load_packaged_templates("answer").templates["en"][key])
            if name
        }
        values = {name: f"<{name} {{0.x}}>" for name in names}
        filled = re.sub(r"{{|}}|{(\w+)}", lambda piece: values.get(piece[1], piece[0][0]), text.lstrip("\n"))
        assert made.fill(key, "en", **values) == filled


@pytest.mark.parametrize("option", ["--config", "--prompts"])
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/", "nowhere", "pipe", "~nosuchuser/x", "bytes", "large"])
def test_a_file_of_settings_that_is_none_is_refused(option, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("bytes").write_bytes(b"\xff\xfe\0")
    Path("large").write_bytes(b"#" * (2 << 20))
    line = ["ask", "Who?", "--model", "fake", "--gate", "never", option, path]
    assert attempt_command(DOOR, "files that are none", line, lambda: capsys.readouterr().err) == 1


PROXIES = [
    "socks5://x:1",
    "socks4://x",
    "ftp://x",
    "http://[::1",
    "://",
    "http://a:secret@z:p",
    "\n",
    "http://\udcff:1",
    "x y",
    "%%%",
]


@pytest.mark.parametrize("value", PROXIES)
@pytest.mark.parametrize("name", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"])
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(name, value, monkeypatch):
    for other in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.delenv(other.lower(), raising=False)
    monkeypatch.setenv(name, value)
    refusal = attempt("environment", "proxies", lambda: create_client().close()).refusal
    assert refusal == "" or (name in refusal and "secret" not in refusal)
    search = attempt(
        "environment", "proxies", lambda: HttpRetriever("http://127.0.0.1:9/", pause=0, deadline=1).search(["x"], 1)
    )
    assert search.refusal
    if refusal:  # else the model would try to reach a server for a while
        model = load_model("openai:m@http://127.0.0.1:9/v1")
        asked = attempt("environment", "proxies", lambda: model.generate([Prompt("x")], max_tokens=1))
        assert asked.refusal == refusal
    assert "secret" not in search.refusal


@pytest.mark.parametrize("home", [None, "", "/dev/null", "/nowhere"])
@pytest.mark.parametrize("cache", [None, "~nosuchuser/x", "file", "/dev/null/x", "/proc/x", "a\nb"])
def test_a_cache_folder_that_cannot_be_used_is_named(home, cache, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("text")
    for name, value in (("HOME", home), ("KNOWGATE_CACHE", cache), ("XDG_CACHE_HOME", None)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    if cache is None and home is None:
        monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))  # not the real one
    line = ["ask", "Who?", "--model", "fake", "--gate", "always", "--docs", "docs"]
    code = attempt_command("environment", "cache folders", line, lambda: capsys.readouterr().err)
    assert code == 1 or cache_dir().is_dir()


ODD = [float("nan"), float("inf"), -1, 0, 2.5, True, None, "3", 10**400, 10**6000, [], 1.0000001, -0.5]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_numbers_as_arguments_are_within_bounds_or_refused(value):
    count = attempt("arguments", "numbers", lambda: check_integer(value, "n"))
    share = attempt("arguments", "numbers", lambda: check_number(value, "share"))
    assert bool(count.refusal)
    assert bool(share.refusal) == (value != 0 or isinstance(value, bool))
