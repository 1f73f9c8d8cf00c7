"""Timing of rollouts: a loop's arguments are wrapped in objects that time the calls and delegate them."""
