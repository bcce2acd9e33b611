"""Labelling on many machines: workers on a Ray cluster hold the LLM, and rows come back as they are finished."""
