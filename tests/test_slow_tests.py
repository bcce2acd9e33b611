"""The list of slow test files, which `make test-fast` leaves out."""

from pathlib import Path

from tools.slow_tests import SLOW_FILES, list_slow_files

REPORT = """<testsuites><testsuite>
<testcase classname="tests.core.test_quick" name="test_a" time="0.1"/>
<testcase classname="tests.models.test_slow" name="test_a" time="1.2"/>
<testcase classname="tests.models.test_slow" name="test_b" time="1.1"/>
</testsuite></testsuites>"""


def test_files_are_listed_by_the_time_of_all_their_tests(tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(REPORT, encoding="utf-8")
    assert list_slow_files(report, 2.0) == ["models/test_slow.py"]


def test_the_listed_files_exist():
    names = SLOW_FILES.read_text(encoding="utf-8").split()
    assert names
    assert [name for name in names if not (Path(__file__).parent / name).is_file()] == []
