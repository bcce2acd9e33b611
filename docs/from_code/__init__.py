"""Parts of the documentation that are made from the code each time it is built. Nothing here is written to disk."""
