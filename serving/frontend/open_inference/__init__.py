"""Transport-independent part of the Open Inference Protocol (KServe v2), shared by REST and gRPC."""
