"""Gated delta rule in its chunkwise-parallel recurrent form: packed sequences, and pages of states."""
