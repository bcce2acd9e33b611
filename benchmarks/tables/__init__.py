"""The tables of RESULTS.md, one subject to a file. `benchmarks/results.py` puts them together."""
