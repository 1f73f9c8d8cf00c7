"""Environments written in JAX: one lane as two pure functions, and an adapter for each suite."""
