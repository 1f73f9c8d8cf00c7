"""Torch policies inside compiled JAX loops: lowered to JAX, or called back."""
