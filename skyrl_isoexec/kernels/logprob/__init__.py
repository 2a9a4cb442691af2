"""Log-probabilities of a vocabulary: whole rows, one token per row, and the pieces that ranks combine."""
