"""The control plane: desired versions, actual versions, and the reconciler between them.

desired state: the versions and executor counts that operators request.
actual state: the state of each version and its executors now.
reconciler: moves each version to its desired state, step by step.
serving map: an immutable map of the registered versions, in which requests find theirs.
snapshot: a file with the served models, which the next start restores.
"""
