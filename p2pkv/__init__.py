"""p2pkv: a peer-to-peer, content-addressed network for LLM KV caches."""

__version__ = "0.1.0"
