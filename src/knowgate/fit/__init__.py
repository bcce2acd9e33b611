"""What trains the artefacts that gates load. From recorded label runs where possible: seconds, no LLM."""
