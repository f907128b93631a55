"""What `rolling_restart.py` is made of: replicas, proxies before them, and clients that never try twice."""
