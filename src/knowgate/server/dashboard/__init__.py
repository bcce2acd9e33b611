"""knowgate.server.dashboard."""
