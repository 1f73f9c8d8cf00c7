"""Batches of frames without an environment."""
