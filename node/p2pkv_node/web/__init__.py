"""Metrics, health and the status page: read-only HTTP on a loopback port, off unless the operator names one.

Whoever has an account on this machine may read it. It changes nothing, and tells no keys and no tokens of a text.
"""
