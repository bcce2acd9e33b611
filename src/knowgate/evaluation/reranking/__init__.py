"""Rankers of passages compared by preferences and answers."""
