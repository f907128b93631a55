"""Keys and certificates: who may call, and over what."""
