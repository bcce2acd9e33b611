"""The server: an OpenAI-compatible endpoint that retrieves only if the LLM does not know the answer."""
