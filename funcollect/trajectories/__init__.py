"""Functions of batches: split trajectories, episode statistics, advantages and n-step returns."""
