"""Labeling: answer questions closed- and open-book, sample, grade and record what an LLM knows."""
