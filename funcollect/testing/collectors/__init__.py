"""The checks of `check_collector`."""
