"""knowgate.server.telemetry."""
