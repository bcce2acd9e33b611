"""The audit of packages fails for vulnerable ones only, never for want of a network."""

import subprocess

import pytest

from tools import audit

SKIPPED = {"name": "a", "skip_reason": "Dependency not found on PyPI"}
SOUND = {"name": "b", "version": "1", "vulns": []}
UNSOUND = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1"}, {"id": "CVE-2"}]}


@pytest.mark.parametrize(
    ("packages", "found"), [([SKIPPED], None), ([SKIPPED, SOUND], []), ([SOUND, UNSOUND], ["c 2: CVE-1, CVE-2"])]
)
def test_only_what_was_looked_up_has_a_verdict(packages, found):
    assert audit.list_vulnerabilities({"dependencies": packages}) == found


@pytest.mark.parametrize("answer", ["", "<html>no network</html>"])
def test_a_service_that_does_not_answer_is_no_failure(monkeypatch, capsys, answer):
    done = subprocess.CompletedProcess([], 1, stdout=answer, stderr="connection refused")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    assert audit.main() == 0
    assert "nothing was checked" in capsys.readouterr().out
