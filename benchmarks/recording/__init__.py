"""Parts of `benchmarks/record.py`: fitting and scoring, what was said before, runs without texts."""
