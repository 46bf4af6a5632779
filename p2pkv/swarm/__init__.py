"""Trio drivers: they run the sans-IO engines over the ports, in the daemon and, in virtual time, in ``sims``."""
