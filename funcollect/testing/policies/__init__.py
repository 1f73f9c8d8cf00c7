"""The checks of `check_policy`."""
