"""SwiGLU's product: silu(gate) * up."""
