"""The report of an evaluation: gates side by side."""
