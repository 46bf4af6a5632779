"""``python -m p2pkv_node`` is the command ``p2pkv-node``."""

from p2pkv_node.main import main

main()
