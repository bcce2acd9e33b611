"""List the test files that take long, which `make test-fast` leaves out.

    PYTEST_ADDOPTS=--junitxml=junit.xml make test
    python -m tools.slow_tests junit.xml --seconds 2

Writes `tests/slow_files.txt`. Run it again when `make test-fast` takes more than 90 seconds.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

SLOW_FILES = Path(__file__).resolve().parent.parent / "tests" / "slow_files.txt"


def list_slow_files(report: Path, seconds: float) -> list[str]:
    """Return the test files, relative to `tests`, whose tests took longer than `seconds` in total."""
    durations: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):  # a report that pytest wrote, so it is trusted
        durations[case.get("classname", "")] += float(case.get("time", "0"))
    slow = [name for name, total in durations.items() if total > seconds]
    return sorted("/".join(name.split(".")[1:]) + ".py" for name in slow)


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JUnit report of a run of all tests")
    parser.add_argument("--seconds", type=float, default=2.0, help="files that take longer are listed")
    options = parser.parse_args()
    SLOW_FILES.write_text("\n".join(list_slow_files(options.report, options.seconds)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
