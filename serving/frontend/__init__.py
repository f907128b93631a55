"""The protocol frontends: REST and gRPC in front of one data plane and one control plane."""
