"""Turns a PyTorch user's model into files that a server loads: read, quantise, compile, verify.

The only part of the archiver that needs torch; other parts import it only when a flag needs it. It depends on
neither handlers nor a server.
"""
