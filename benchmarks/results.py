"""benchmarks/RESULTS.md and benchmarks/results/*.md from the recorded runs in benchmarks/runs: `make results`.

Every table is computed from the recorded rows and needs. No LLM and no benchmark data are needed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.graders import graders_table
from benchmarks.tables.cbdr import cbdr_details, cbdr_section
from benchmarks.tables.claims import claims_table, format_oracle_savings
from benchmarks.tables.common import HERE, MODELS, QWEN, SMOLLM
from benchmarks.tables.dhicl import dhicl_details, dhicl_section
from benchmarks.tables.gates import main_tables
from benchmarks.tables.guarantee import guarantee_table
from benchmarks.tables.ik import draw_histogram, ik_section
from benchmarks.tables.ik_transfer import transfer_section
from benchmarks.tables.judge import draw_judge, judge_tables
from benchmarks.tables.kbm import kbm_details, kbm_section
from benchmarks.tables.llama import llama_tables
from benchmarks.tables.policy import policy_tables
from benchmarks.tables.provenance import provenance_table
from benchmarks.text_systems import systems_tables

INTRO = HERE / "results_intro.md"
PAGES: Mapping[str, Callable[[], Iterable[str]]] = {
    "kbm.md": kbm_section,
    "kbm-details.md": kbm_details,
    "ik.md": ik_section,
    "cbdr.md": cbdr_section,
    "cbdr-details.md": cbdr_details,
    "dh-icl.md": dhicl_section,
    "dh-icl-details.md": dhicl_details,
    "policy.md": policy_tables,
    "judge.md": judge_tables,
    "systems.md": systems_tables,
    "recorded-answers.md": llama_tables,
    "graders.md": graders_table,
    "gates-qwen.md": lambda: main_tables(QWEN, MODELS[QWEN]),
    "gates-smollm.md": lambda: main_tables(SMOLLM, MODELS[SMOLLM]),
    "transfer.md": transfer_section,
    "guarantee.md": guarantee_table,
    "runs.md": provenance_table,
}
CLAIMS_MARK, ORACLES_MARK = "<!-- claims -->", "<!-- oracles -->"


def render_page(section: Callable[[], Iterable[str]]) -> str:
    """Render a section as a page of its own: its titles move up one level."""
    return re.sub(r"^#(#+ )", r"\1", "\n".join(section()), flags=re.MULTILINE)


def render_results() -> Iterator[tuple[str, str]]:
    """Yield (path below `benchmarks`, text) of RESULTS.md and of every page that has records."""
    intro = INTRO.read_text(encoding="utf-8").replace(ORACLES_MARK, format_oracle_savings())
    yield "RESULTS.md", intro.replace(CLAIMS_MARK, claims_table())
    for name, section in PAGES.items():
        if text := render_page(section):
            yield f"results/{name}", text


def main() -> None:
    """Write all pages into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of RESULTS.md and results/")
    folder: Path = parser.parse_args().out
    (folder / "results").mkdir(parents=True, exist_ok=True)
    for name, text in render_results():
        (folder / name).write_text(text, encoding="utf-8")
        print(name, len(text.splitlines()), "lines")
    draw_judge(folder)
    draw_histogram(folder)


if __name__ == "__main__":
    main()
