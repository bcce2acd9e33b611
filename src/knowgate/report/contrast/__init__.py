"""The report of two evaluations held against each other."""
