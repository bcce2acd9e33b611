"""Two evaluations held against each other: before and after, two LLMs, two indexes."""
