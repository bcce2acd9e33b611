"""knowgate.data."""
