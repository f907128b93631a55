"""Settings: the configuration keys, their sources, and the precedence of the sources."""
