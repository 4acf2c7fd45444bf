"""What a graph says about the structure of a Jacobian, token by token."""
