"""knowgate.models.prompts."""
