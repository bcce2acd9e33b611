"""The upstream: the OpenAI-compatible server that answers, and how requests are forwarded to it."""
