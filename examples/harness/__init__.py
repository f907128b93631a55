"""What all examples share: pack an archive, serve it, stop the server, say what went wrong."""
