"""HTTP/2 with gRPC's messages on it, served on the event loop. Knows nothing of models."""
