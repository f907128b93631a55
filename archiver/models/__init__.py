"""What a PyTorch user has becomes what a server loads: read, quantise, compile, verify.

The only room of the archiver that needs torch. The rest of it imports this one when a flag asks for it, and
not before; it knows neither handlers nor a server.
"""
