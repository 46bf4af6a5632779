"""How fast an artifact gets from seeders to a consumer, measured beside other systems and the limit of the machine.

``python -m bench.transfer``; ``docs/benchmarks.md`` says what is measured and how.
"""
