"""Known vulnerabilities of installed packages (`make check`), where the service that knows them can be reached.

Without it nothing fails: a line says that nothing was audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

COMMAND = [sys.executable, "-m", "pip_audit", "--skip-editable", "--progress-spinner", "off", "--timeout", "5"]
PATIENCE = 120  # seconds


def main() -> int:
    try:
        done = subprocess.run([*COMMAND, "--format", "json"], capture_output=True, text=True, timeout=PATIENCE)
        found = verdict(json.loads(done.stdout))
    except (subprocess.TimeoutExpired, ValueError):  # it prints no JSON where the service does not answer
        found = None
    if found is None:
        sys.stdout.write("pip-audit: its service cannot be reached from here; nothing was audited.\n")
        return 0
    sys.stdout.writelines(f"pip-audit: {line}\n" for line in found or ["no known vulnerabilities"])
    return 1 if found else 0


def verdict(report: dict[str, Any]) -> list[str] | None:
    """A line for each vulnerable package; None where no package could be looked up."""
    audited = [one for one in report["dependencies"] if "skip_reason" not in one]
    if not audited:
        return None
    return [
        f"{one['name']} {one['version']}: {', '.join(flaw['id'] for flaw in one['vulns'])}"
        for one in audited
        if one["vulns"]
    ]


if __name__ == "__main__":
    sys.exit(main())
