"""Environments whose simulators are Python objects: base classes, checks, rows of observations."""
