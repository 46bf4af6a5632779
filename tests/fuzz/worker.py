"""``python -m tests.fuzz.worker RUNS SEED TARGET...``: fuzz targets with atheris, guided by the coverage of our own code.

libFuzzer ends the process that it runs in, so each target has a child, forked when all is imported and instrumented. Prints
for each a line of JSON: ``target``, ``outcomes`` (how many inputs ended how), ``escapes`` (an input in hex by what was raised)
and ``seconds`` of a processor. Exits with 1 where a child ended in any other way; what libFuzzer says is on standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Final

import atheris

with atheris.instrument_imports(include=["p2pkv", "p2pkv_node"]):
    from tests.fuzz.mutation import chance, mutate
    from tests.fuzz.registry import TARGETS
    from tests.fuzz.target import ESCAPED

_MAX_INPUT_BYTES: Final = 4096
# An input that takes longer hangs: the slowest target takes a millisecond.
_HANG_S: Final = 10
# Escapes that are kept, one for each place that raises: one defect may be met a million times.
_MAX_ESCAPES: Final = 20


def main() -> int:
    runs, seed, *names = sys.argv[1:]
    gc.freeze()  # what is imported stays, and is not walked in every child
    for name in names:
        with tempfile.TemporaryDirectory(prefix="p2pkv-fuzz-") as corpus:
            child = os.fork()
            if not child:
                _fuzz(name, int(runs), seed, corpus)
            _, status = os.waitpid(child, 0)
        if status:
            print(f"fuzzing {name} ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
            return 1
    return 0


def _fuzz(name: str, runs: int, seed: str, corpus: str) -> None:
    target = TARGETS[name]
    left = runs
    outcomes: Counter[str] = Counter()
    escapes: dict[str, str] = {}
    began = time.process_time()

    def run_one(data: bytes) -> None:
        nonlocal left
        try:
            outcomes[target.run(data)] += 1
        except Exception as error:  # whatever it is: that it came is what is reported
            outcomes[ESCAPED] += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            if len(escapes) < _MAX_ESCAPES:
                escapes.setdefault(
                    f"{type(error).__name__} at {place.filename}:{place.lineno}", f"{error!s:.200}: {data.hex()}"
                )
        left -= 1
        if left == 0:
            result = {"target": name, "outcomes": outcomes, "escapes": escapes, "seconds": time.process_time() - began}
            print(json.dumps(result), flush=True)
            os._exit(0)  # libFuzzer has no other way to return

    def mutated(data: bytes, most: int, number: int) -> bytes:
        """Half as libFuzzer does, half by structure, without which little gets past the first check."""
        if number % 2:
            changed: bytes = atheris.Mutate(data, most)
            return changed
        return mutate((data, *target.seeds), chance(number))[:most]

    for place, data in enumerate(target.seeds):
        Path(corpus, f"{place:04}").write_bytes(data)
    options = [f"-seed={seed}", "-runs=-1", f"-max_len={_MAX_INPUT_BYTES}", f"-timeout={_HANG_S}", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={corpus}/", corpus], run_one, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
