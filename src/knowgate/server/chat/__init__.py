"""knowgate.server.chat."""
