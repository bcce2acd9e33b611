"""knowgate.cli."""
