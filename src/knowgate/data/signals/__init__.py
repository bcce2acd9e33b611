"""Signals computed from a reading: token confidence, agreement of samples, hidden states and embeddings."""
