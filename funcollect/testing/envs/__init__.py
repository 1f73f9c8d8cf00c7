"""The checks of `check_env`."""
