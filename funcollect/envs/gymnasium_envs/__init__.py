"""Gymnasium environments, in this process or in others, and Atari games."""
