"""LLMs behind an OpenAI-compatible server: the `openai:MODEL@URL` backend."""
