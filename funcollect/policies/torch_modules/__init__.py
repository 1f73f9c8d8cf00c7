"""Policies that are Torch modules."""
