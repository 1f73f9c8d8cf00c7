"""What worker collectors share, whatever the transport: the pool, gathering, weights, and the worker loop itself."""
