"""Workers in processes of this machine, with batches and weights in shared memory."""
