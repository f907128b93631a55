"""The Open Inference Protocol (KServe v2) without a wire: what its REST and its gRPC service share."""
