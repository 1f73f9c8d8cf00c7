"""Timing of rollouts: what is passed to a loop is wrapped in objects that time the calls and delegate them."""
