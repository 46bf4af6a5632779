"""Benches and the data they need: run from the checkout, not part of the wheel."""
