"""Settings: what may be set, where it is read from, and which source wins."""
