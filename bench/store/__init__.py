"""How fast the store publishes, reads back and opens, measured beside plain files on the same disk.

``python -m bench.store``; ``docs/benchmarks.md`` says what is measured and how.
"""
