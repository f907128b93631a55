"""Public API for handler authors: what runs a model inside the server, and what it may use."""
