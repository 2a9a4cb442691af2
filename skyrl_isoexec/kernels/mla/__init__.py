"""Multi-head latent attention in its latent form: one key for all heads at each position, whose latent is the value."""
