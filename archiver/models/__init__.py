"""Turns a PyTorch user's model into files that a server loads: read, quantise, compile, verify.

The only part of the archiver that needs torch; the others import this package only when a flag needs it. It
depends on neither handlers nor a server.
"""
