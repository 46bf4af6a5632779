"""Routing decisions, sans-IO: under which keys an artifact is announced and looked up, and which manifest to take."""
