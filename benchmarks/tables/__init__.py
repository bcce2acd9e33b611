"""The tables of RESULTS.md, one topic per module. `benchmarks/results.py` assembles the pages."""
