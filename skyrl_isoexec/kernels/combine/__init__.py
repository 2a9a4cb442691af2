"""Combine: rows to their experts and, weighted, back to their tokens."""
