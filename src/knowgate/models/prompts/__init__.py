"""Prompt templates in English and Chinese, and functions that build prompts from them."""
