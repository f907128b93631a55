"""The REST frontend: predictions are answered on their connections, all else by an ASGI app."""
