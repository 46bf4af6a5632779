"""What is wrong with a node, its home and its machine, and what to do about it: ``p2pkv doctor``."""
