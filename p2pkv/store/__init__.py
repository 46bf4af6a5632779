"""Blocks, index, keys and trust on this machine's disk: the only code of p2pkv that writes files.

Everything here is synchronous and safe to call from any thread; callers on an event loop use worker threads.
"""
