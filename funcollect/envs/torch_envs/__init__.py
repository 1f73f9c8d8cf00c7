"""Batched environments written in Torch."""
