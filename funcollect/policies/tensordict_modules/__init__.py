"""Policies that read and write TensorDicts."""
