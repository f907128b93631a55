"""Every metric family, the exposition, traces and log lines of a server."""
