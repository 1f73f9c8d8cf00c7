"""Modules and expressions to lower, and comparisons with their lowered forms."""
