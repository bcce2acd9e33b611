"""API keys, access control and request rates."""
