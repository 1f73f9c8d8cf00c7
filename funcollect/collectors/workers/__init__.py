"""Workers over any transport: the jobs and the worker itself, gathering of batches, and weights."""
