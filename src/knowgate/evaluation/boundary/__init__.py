"""What an LLM knows, and what retrieval does to it."""
