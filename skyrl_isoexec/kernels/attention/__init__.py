"""Causal attention: packed rows, and a paged cache of keys and values."""
