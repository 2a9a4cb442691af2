"""RMSNorm, alone and after adding to the residual stream."""
