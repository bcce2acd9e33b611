"""Statistics: quality metrics, bootstrap intervals, paired tests, proportions, and confidence sequences."""
