"""Measure how far honest values lie apart, on one stack and across stacks, for the table of ``p2pkv.trust.tolerances``."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from bench.trust.subject import KV, Subject, compute, load, measure, texts
from p2pkv.connectors.hf.deviations import relative
from p2pkv.formats.tensors import Dtype
from p2pkv.trust.spot_check import draw_positions
from p2pkv.trust.tolerances import MARGINS, Tolerance

# Few positions vary most: what holds for them holds for more.
_DRAWS, _POSITIONS = 200, 8
# Another way to the same values on this machine: other instructions, other attention kernels, another number of threads.
_OTHER: Final = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}

console = Console(highlight=False, width=200)


def calibrate(tokens: int, dtypes: Sequence[Dtype]) -> None:
    """Print deviations by dtype and stack, and the bounds that follow."""
    for dtype in dtypes:
        model = load(dtype)
        found = [Subject(model, ids, compute(model, ids)) for ids in texts(tokens).values()]
        others = _elsewhere(dtype, tokens)
        for name, given in (("SAME_STACK", [one.honest for one in found]), ("OTHER_STACK", others)):
            measured = [measure(one, kv) for one, kv in zip(found, given, strict=True)]
            raw = [_highest([getattr(one, half) for one in measured]) for half in ("keys", "values")]
            bounds = ", ".join(_bound(dtype, tolerance) for tolerance in raw)
            console.print(f"{name} Dtype.{dtype.name}: ({bounds}),  # measured {_row(raw)}")


def _highest(halves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Tolerance:
    """Return the highest mean and the worst deviation of many draws over all texts."""
    rng = random.Random(1)
    mean = worst = 0.0
    for difference, scale in halves:
        for _ in range(_DRAWS):
            drawn = draw_positions(difference.shape[1], _POSITIONS, rng)
            found = relative(difference[:, drawn], scale[:, drawn])
            mean, worst = max(mean, float(found.mean())), max(worst, float(found.max()))
        worst = max(worst, float(relative(difference, scale).max()))
    return Tolerance(mean, worst)


def _bound(dtype: Dtype, measured: Tolerance) -> str:
    mean, worst = MARGINS[dtype]
    return f"Tolerance({measured.mean * mean:.1e}, {measured.worst * worst:.1e})"


def _row(raw: Sequence[Tolerance]) -> str:
    return "; ".join(f"{one.mean:.1e}, {one.worst:.1e}" for one in raw)


def _elsewhere(dtype: Dtype, tokens: int) -> list[list[KV]]:
    """Return the KV of all texts as another process computes them, on another stack."""
    with tempfile.TemporaryDirectory(prefix="p2pkv-calibrate-") as folder:
        file = Path(folder) / "kv.safetensors"
        command = [sys.executable, "-m", "bench.trust.calibrate", dtype.value, str(tokens), str(file)]
        subprocess.run(command, check=True, env={**os.environ, **_OTHER})
        held = load_file(file)
    return [list(_layers(held, name)) for name in texts(tokens)]


def _layers(held: dict[str, torch.Tensor], text: str) -> Iterator[KV]:
    layer = 0
    while f"{text}.{layer}.k" in held:
        yield held[f"{text}.{layer}.k"], held[f"{text}.{layer}.v"]
        layer += 1


def main() -> None:
    """Be the other process: compute all texts and keep their KV in a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("dtype", type=Dtype)
    parser.add_argument("tokens", type=int)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load(options.dtype, attn_implementation="eager")
    tensors: dict[str, torch.Tensor] = {}
    for name, ids in texts(options.tokens).items():
        for layer, (keys, values) in enumerate(compute(model, ids)):
            tensors |= {f"{name}.{layer}.k": keys.contiguous(), f"{name}.{layer}.v": values.contiguous()}
    save_file(tensors, options.file)


if __name__ == "__main__":
    main()
