"""The .proto sources of the gRPC services, and what `generate.py` makes of them."""
