"""Chains of known layers: their Jacobians, multiplied in the cheapest order."""
