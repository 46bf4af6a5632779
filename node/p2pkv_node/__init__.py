"""The shell of a p2pkv node: libp2p, sockets, HTTP. The only package that imports libp2p."""
