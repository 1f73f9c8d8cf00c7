"""Programs that tests start in separate processes."""
