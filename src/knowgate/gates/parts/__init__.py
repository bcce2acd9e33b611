"""What gates share that learn from a log or ask with label words."""
