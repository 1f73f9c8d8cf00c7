"""Processes of our own on this machine: how they start, talk, share memory, and end with the one that started them."""
