"""Check the installed packages for known vulnerabilities with pip-audit (`make check`).

If the vulnerability service cannot be reached, print one line and pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

COMMAND = [sys.executable, "-m", "pip_audit", "--skip-editable", "--progress-spinner", "off", "--timeout", "5"]
TIMEOUT = 120  # seconds


def main() -> int:
    """Run pip-audit and return the exit code."""
    try:
        process = subprocess.run([*COMMAND, "--format", "json"], capture_output=True, text=True, timeout=TIMEOUT)
        vulnerabilities = list_vulnerabilities(json.loads(process.stdout))
    except (subprocess.TimeoutExpired, ValueError):  # It prints no JSON if the service does not answer.
        vulnerabilities = None
    if vulnerabilities is None:
        sys.stdout.write("pip-audit: the vulnerability service cannot be reached; nothing was checked.\n")
        return 0
    sys.stdout.writelines(f"pip-audit: {line}\n" for line in vulnerabilities or ["no known vulnerabilities"])
    return 1 if vulnerabilities else 0


def list_vulnerabilities(report: dict[str, Any]) -> list[str] | None:
    """Return one line per vulnerable package, or None if no package could be checked."""
    audited = [package for package in report["dependencies"] if "skip_reason" not in package]
    if not audited:
        return None
    return [
        f"{package['name']} {package['version']}: {', '.join(vulnerability['id'] for vulnerability in package['vulns'])}"
        for package in audited
        if package["vulns"]
    ]


if __name__ == "__main__":
    sys.exit(main())
