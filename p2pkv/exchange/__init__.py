"""``/p2pkv/exchange/1.0.0``: the block exchange as sans-IO engines. Spec: ``docs/spec/exchange.md``.

Bytes and calls go in, bytes and events come out; no socket, clock or thread here.
"""
