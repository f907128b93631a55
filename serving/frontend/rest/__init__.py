"""The REST frontend: predictions are answered on their connections, other requests by an ASGI app."""
