"""Workers: the processes that run batches, and the server's side of them."""
