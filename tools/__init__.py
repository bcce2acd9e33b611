"""Tools for developers: documentation generators, structure report, security audit."""
