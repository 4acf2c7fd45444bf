"""dY/dX for every sample of a batch, from one forward pass."""
