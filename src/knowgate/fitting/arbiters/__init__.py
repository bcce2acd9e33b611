"""Fitting arbiters, which choose between two answers after retrieval."""
