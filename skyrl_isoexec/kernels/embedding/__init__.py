"""Embedding: a gather of rows, never a sum of masked shards."""
