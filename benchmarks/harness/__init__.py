"""Interleaved rounds of contestants, their report as tables and JSON, and its pictures."""
