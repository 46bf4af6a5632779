"""The simulated world: the ports of :mod:`p2pkv.ports` without sockets, threads or disk, fit for virtual time."""
