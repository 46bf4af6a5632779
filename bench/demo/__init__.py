"""The demo: a real model skips its prefill with a cache loaded from several peers, and says what it would have said."""
