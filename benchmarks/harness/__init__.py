"""What `benchmarks/run.py` is made of: peers, models, load, rows, figures and their report."""
