"""The client library: programs talk to the daemon of their machine and read verified blocks from its files."""
