"""The .proto sources of the gRPC services, and the modules that `generate.py` generates from them."""
