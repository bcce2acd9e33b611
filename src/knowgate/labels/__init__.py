"""What does this LLM know? Samples, grades, mastery, certainty and the effect of retrieval, question by question."""
