"""Policies: choose gate, arbiter and threshold together from label runs, prove the choice, and write one folder."""
