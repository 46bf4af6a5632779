"""The download engine: which block to ask of which peer, and when to give up on one. Sans-IO (``docs/architecture.md``)."""
