"""Shorter ways to a Jacobian. Without this folder every result is the same."""
