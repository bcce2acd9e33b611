"""A guided first run: from documents and an LLM to an index, labels, a gate, a report and settings."""
