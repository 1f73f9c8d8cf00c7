"""States over real simulators, which can be used once, and how they are forked."""
