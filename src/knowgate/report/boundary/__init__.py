"""The report of label runs: what the LLM knows."""
