"""What the server records about requests: traces, metrics, spans, statistics and the decision log."""
