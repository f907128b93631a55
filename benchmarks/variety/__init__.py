"""What `formats.py` is made of: models of many kinds, one trial in a child process, and the table."""
