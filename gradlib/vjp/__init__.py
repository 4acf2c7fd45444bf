"""Vector-Jacobian products: checked, explained, and computed."""
