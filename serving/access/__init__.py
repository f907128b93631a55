"""Access control: clients with their roles and identities, API keys and TLS certificates.

identity: a client as the operator has named it.
role: the calls that a client may make: `inference`, `management` or `metrics`.
kind of a key: its role, or renewal of the keys (`API`).
key pair: a TLS certificate chain and its private key.
"""
