"""Teaching a cross-encoder which passages the LLM can use."""
