"""What `quantization.py` is made of: the models, one measurement, and the document."""
