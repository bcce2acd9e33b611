"""Write the generated sections of README, CONTRIBUTING and docs into their files: `make readme`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.tables.closed_book import curve_table
from benchmarks.tables.judge_advice import amount_table, label_table, size_table
from benchmarks.tables.policy import readme_table
from benchmarks.tables.speed import labeling_table, speed_table
from tools.adapter_versions import version_table
from tools.docs.gate_sections import render_gate_table
from tools.pages import EXAMPLES
from tools.structure import ROOT, layer_table


def render_gate_example() -> str:
    """Return the example gate of the documentation as a code block."""
    return f"```python\n{(EXAMPLES / 'long_answer_gate.py').read_text(encoding='utf-8').strip()}\n```"


SECTIONS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"policies": readme_table},
    "docs/which-gate.md": {"gates": render_gate_table},
    "docs/gate-measurements.md": {"learning curve": curve_table},
    "docs/judges.md": {"judge sizes": size_table, "judge labels": label_table, "judge rows": amount_table},
    "docs/speed.md": {"speed": speed_table, "labeling": labeling_table},
    "docs/integrations.md": {"tested versions": version_table},
    "CONTRIBUTING.md": {"layers": layer_table, "gate example": render_gate_example},
}


def update_sections(page: str) -> str:
    """Return the text of a page with updated generated sections. Each section is between two markers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, render in SECTIONS[page].items():
        before, start, rest = text.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not (start and end):
            raise ValueError(f"{page} has no markers <!-- {name} --> and <!-- /{name} -->. Add both.")
        text = f"{before}{start}\n{render()}\n{end}{after}"
    return text


def main() -> None:
    """Write every page."""
    for page in SECTIONS:
        (ROOT / page).write_text(update_sections(page), encoding="utf-8")


if __name__ == "__main__":
    main()
