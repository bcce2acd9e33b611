"""Adapters that use knowgate inside other frameworks, and models and retrievers of those frameworks inside knowgate.

Each framework has its own module here and its own extra. It is imported only when you import its module.
"""
