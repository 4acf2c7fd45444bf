"""Jacobians with respect to parameters, from inputs and gradients of operations."""
