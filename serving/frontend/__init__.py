"""The only room that knows a protocol: REST and gRPC in front of one data plane and one control plane."""
