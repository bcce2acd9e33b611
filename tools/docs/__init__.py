"""Generators of the documentation that is made from the code."""
