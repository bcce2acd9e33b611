"""A guided first run: from documents, an LLM and perhaps questions to an index, labels, a gate, a report and settings."""
