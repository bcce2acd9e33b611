"""Retrievers in front of search engines: your own database, search server or endpoint, and web search."""
