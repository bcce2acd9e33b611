"""benchmarks/RESULTS.md from the recorded runs in benchmarks/runs: `make results`. No LLM, no benchmark data needed.

Every table is computed anew from the rows and needs on record; nothing is copied from an earlier run of this script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.tables.cbdr import cbdr_section, matrices
from benchmarks.tables.common import HERE, MODELS
from benchmarks.tables.dhicl import dhicl_section
from benchmarks.tables.gates import main_tables
from benchmarks.tables.guarantee import guarantee_table
from benchmarks.tables.ik import ik_section
from benchmarks.tables.judge import draw_judge, judge_tables
from benchmarks.tables.kbm import kbm_section
from benchmarks.tables.llama import llama_tables
from benchmarks.tables.policy import policy_tables
from benchmarks.tables.provenance import provenance_table

SECTIONS = (
    kbm_section,
    ik_section,
    cbdr_section,
    dhicl_section,
    llama_tables,
    policy_tables,
    judge_tables,
    matrices,
    guarantee_table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    options = parser.parse_args()
    parts = [(HERE / "results_intro.md").read_text(), *provenance_table()]
    for model, title in MODELS.items():
        parts += main_tables(model, title)
    for section in SECTIONS:
        parts += section()
    options.out.write_text("\n".join(parts))
    draw_judge(options.out.parent)
    print(options.out.name, len("\n".join(parts)), "characters")


if __name__ == "__main__":
    main()
