"""What is read off batches: trajectories cut apart, and statistics of finished episodes."""
