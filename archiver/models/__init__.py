"""Turns a PyTorch user's model into files that a server loads: read, quantise, compile, verify.

The only part of the archiver that needs torch. The other parts import it only when a flag asks for it. It
depends on neither handlers nor a server.
"""
