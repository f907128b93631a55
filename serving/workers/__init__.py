"""Workers: the processes that run batches, and what the server knows of them."""
