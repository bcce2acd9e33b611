"""Steps of the CI workflows, as commands that run anywhere: `python tools/ci.py STEP`.

Each step makes a virtual environment of its own under `.venv-ci/`, so that it tests what a user would install. Only the standard
library is imported here, because the script starts before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv-ci"
TEST_PACKAGES = [
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "openai>=1.50",
    "PyYAML",
]
FAST_TESTS = [
    "-q",
    "-n",
    "logical",
    "--maxprocesses",
    "4",
    "--dist",
    "loadfile",
    "-m",
    "not slow and not model and not process and not records",
]
# Torch for the CPU, as in the Makefile. Other builds are gigabytes larger.
TORCH = "torch==2.13.0"


class Environment:
    """A virtual environment under `.venv-ci/`.

    Args:
        name: Name of its folder.
    """

    def __init__(self, name: str):
        self.folder = ENVIRONMENTS / name
        if not self.folder.exists():
            venv.create(self.folder, with_pip=True)
        self.python = next(
            path for path in (self.folder / "bin/python", self.folder / "Scripts/python.exe") if path.exists()
        )
        self.install("pip>=25.1")  # Older versions take long to resolve dependencies.

    def install(self, *requirements: str, constraints: str = "constraints.txt") -> None:
        """Install requirements under constraints."""
        self.run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, *requirements)

    def run(self, *arguments: str, cwd: Path = ROOT) -> None:
        """Run Python with arguments, and stop the step if it fails."""
        sys.stdout.write(f"+ python {' '.join(arguments)}\n")
        sys.stdout.flush()
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.run([str(self.python), *arguments], cwd=cwd, env=variables, check=False)
        if process.returncode:
            sys.exit(process.returncode)


def minimal() -> None:
    """Test core and server without torch: import, commands, and the fast tests of these parts."""
    environment = Environment("minimal")
    environment.install(".[serve]", *TEST_PACKAGES)
    smoke_test(environment)
    environment.run(
        "-m",
        "pytest",
        *FAST_TESTS,
        "tests/core",
        "tests/types",
        "tests/stats",
        "tests/server",
        "tests/retrieval",
        "tests/cli",
    )


def full() -> None:
    """Install everything, then run the linters, mypy and the fast tests."""
    environment = Environment("full")
    environment.install(TORCH)
    environment.install("-e", ".[all,dev]")
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "mypy")
    environment.run("-m", "pytest", *FAST_TESTS)


def wheel() -> None:
    """Build the wheel, install it in an environment without the checkout, and run a smoke test."""
    builder = Environment("builder")
    builder.install("build", "twine", "setuptools>=77")
    builder.run("-m", "tools.dist")
    user = Environment("user")
    (wheel_file,) = (ROOT / "dist").glob("*.whl")
    user.run(
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--force-reinstall",
        "--no-deps",
        str(wheel_file),
    )
    user.install(f"{wheel_file}[serve]")
    smoke_test(user)


def lowest() -> None:
    """Test with the lowest versions that `pyproject.toml` allows for the extra `all`.

    Torch has the version of `constraints.txt`. Versions without a binary package for this platform are ignored, because
    few users can build them.
    """
    environment = Environment("lowest")
    environment.install("uv")
    environment.install(TORCH)
    pins, overrides = ENVIRONMENTS / "lowest.txt", ENVIRONMENTS / "overrides.txt"
    overrides.write_text("torch; python_version < '3'\n", encoding="utf-8")  # excludes torch and its dependencies
    # fmt: off
    environment.run("-m", "uv", "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--only-binary", ":all:",
                    "--extra", "all", "--override", str(overrides), "--python", str(environment.python),
                    "--output-file", str(pins), "pyproject.toml")
    environment.run("-m", "uv", "pip", "install", "--quiet", "--python", str(environment.python), "-r", str(pins),
                    *TEST_PACKAGES)
    # fmt: on
    environment.install("--no-deps", "-e", ".")
    smoke_test(environment)
    environment.run("-m", "pytest", *FAST_TESTS)


def integrations() -> None:
    """Test every adapter with its framework."""
    environment = Environment("integrations")
    environment.install(TORCH)
    environment.install("-e", ".[local,train,serve,integrations]", *TEST_PACKAGES)
    environment.run("-m", "pytest", "-q", "tests/integrations")


def fuzz() -> None:
    """Try many invalid inputs, other ones each time; the release checklist repeats the same ones."""
    environment = Environment("full")
    environment.install(TORCH)
    environment.install("-e", ".[all,dev]")
    os.environ["KNOWGATE_FUZZ"] = "random"
    environment.run("-m", "pytest", "-q", "-n", "logical", "--dist", "loadfile", "tests/fuzz")


def extras() -> None:
    """Resolve every extra under the constraints, without installing it."""
    import tomllib

    environment = Environment("extras")
    names = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    environment.install(TORCH)
    for name in names:
        environment.install("--dry-run", f".[{name}]")


def smoke_test(environment: Environment) -> None:
    """Run the installed package from a folder outside the checkout."""
    folder = ENVIRONMENTS
    environment.run("-c", "import knowgate; print(knowgate.__version__, len(knowgate.__all__))", cwd=folder)
    environment.run("-m", "knowgate", "--help", cwd=folder)
    environment.run("-m", "knowgate", "doctor", cwd=folder)
    environment.run("-m", "knowgate", "demo", "--quick", cwd=folder)


STEPS: dict[str, Callable[[], None]] = {
    step.__name__: step for step in (minimal, full, wheel, lowest, integrations, fuzz, extras)
}


def main() -> None:
    """Run the step that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=sorted(STEPS))
    ENVIRONMENTS.mkdir(exist_ok=True)
    STEPS[parser.parse_args().step]()


if __name__ == "__main__":
    main()
