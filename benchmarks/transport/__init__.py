"""What `grpc_transport.py` measures: a front process with each gRPC transport, and a worker process."""
