"""Modules and expressions to lower, and comparisons of what becomes of them."""
