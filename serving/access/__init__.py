"""Access control: API keys and TLS certificates."""
