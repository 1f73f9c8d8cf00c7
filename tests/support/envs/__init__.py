"""Environments for tests."""
