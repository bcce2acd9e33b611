"""knowgate.server.auth."""
