"""Gated delta rule in its row-causal chunk form: packed sequences, and pages of states."""
