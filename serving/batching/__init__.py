"""Puts requests of one version together: a bounded queue, a pure policy, and the batcher that obeys both."""
