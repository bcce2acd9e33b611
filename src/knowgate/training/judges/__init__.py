"""Fine-tune judges: models that say whether an answer, or the LLM's knowledge, is right."""
