"""Fine-tuning a causal model to judge what the LLM knows (IK, KBM)."""
