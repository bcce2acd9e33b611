"""Choice of a gate's threshold on label runs: by guarantee, retrieval rate or accuracy. No LLM runs."""
