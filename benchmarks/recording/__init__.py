"""Parts of `benchmarks/record.py`: fit and score gates, read recorded needs, pack label runs."""
