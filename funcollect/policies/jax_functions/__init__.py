"""Policies that are JAX functions."""
