"""transformers models: one pass that reads, drafts, samples and goes on."""
