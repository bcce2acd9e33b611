"""Adapters: knowgate inside the frameworks you already use, and their models and retrievers inside knowgate.

Each framework has one module and one extra, and is imported only when its module is used.
"""
