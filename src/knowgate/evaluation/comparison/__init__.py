"""Gates compared on the same questions."""
