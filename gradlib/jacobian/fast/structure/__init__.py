"""The Jacobian from a graph's structure: which axes depend on which, as tokens."""
