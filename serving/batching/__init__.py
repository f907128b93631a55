"""Batching of the requests of one version: a bounded queue, a pure policy, and the batchers.

batcher: holds the waiting requests of a version and dispatches batches of them to executors.
admission: the decision whether a request may enter the queue.
suspect: a request that was running when an executor crashed; it runs alone the next time.
conviction: the crash of the executor of a suspect; the request is quarantined: rejected from now on.
sequence: related requests that run in order on one executor.
"""
