"""Access control: API keys and TLS certificates.

kind of a key: the calls that it authorizes, `inference` or `management`, or renewal of the keys (`API`).
key pair: a TLS certificate chain and its private key.
"""
