"""Policies for tests."""
