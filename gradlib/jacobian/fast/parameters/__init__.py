"""Jacobians with respect to parameters, from gradients inside and what came in."""
