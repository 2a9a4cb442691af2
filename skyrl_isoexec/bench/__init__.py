"""What things cost: our operators beside those of the stock stack, on the same shapes, in the same run."""
