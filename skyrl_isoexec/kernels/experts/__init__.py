"""Experts: a linear with a weight of its own for each group of rows."""
