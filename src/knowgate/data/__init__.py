"""Data: question readers, label runs, signals of readings, preference records, and the history of questions."""
