"""Lanes over worker processes: many simulators on one host whose policy acts for all of them in one call."""
