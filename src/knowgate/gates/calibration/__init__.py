"""Thresholds of gates: chosen by guarantee, retrieval rate or accuracy on label runs. Runs no LLM."""
