"""The REST frontend: plain predictions are answered on the connection, all else goes through uvicorn."""
