"""Workers as Ray actors, with batches and weights in its object store."""
