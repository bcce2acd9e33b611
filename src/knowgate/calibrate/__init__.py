"""Thresholds: by guarantee, by budget or by accuracy, each with the evidence for it.

Works on needs and graded answers; knows nothing of how a gate came about, and runs no LLM.
"""
