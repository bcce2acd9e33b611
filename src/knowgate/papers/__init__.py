"""knowgate.papers."""
