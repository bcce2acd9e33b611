"""knowgate.server.upstream."""
