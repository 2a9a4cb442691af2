"""Linear: one fp32 accumulator per element, K ascending, rounded once."""
