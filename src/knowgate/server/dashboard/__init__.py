"""The dashboard: a page that shows what the server does."""
