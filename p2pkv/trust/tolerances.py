"""How far honestly computed KV values lie apart, by dtype and by whether the same stack computed both.

``python -m bench.trust --calibrate`` measures the deviations and prints this table anew. A deviation is that of one token in
one layer: the root mean square of the difference over its heads and dimensions, by the root mean square of the layer's
recomputed keys (or values) at all compared tokens. ``worst`` bounds each of them, ``mean`` their mean over tokens and layers.

Rounding adds up from layer to layer: a model with more layers than the calibrated one has bounds that are wider in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from p2pkv.formats.tensors import Dtype


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds of the deviations of keys or of values, relative to their root mean square."""

    mean: float
    worst: float

    def of_layers(self, layers: int) -> Tolerance:
        """Return the bounds for a model of ``layers`` layers."""
        wider = max(1.0, layers / CALIBRATED_LAYERS)
        return Tolerance(self.mean * wider, self.worst * wider)


# Measured with SmolLM2-135M on texts of prose, code and random tokens: the highest mean of eight tokens and the worst single
# deviation, times a margin for texts and models that were not measured. fp32 leaves room for a wide one; in bf16 what a margin
# hides is as large as the rounding that every model in bf16 lives with.
CALIBRATED_LAYERS: Final = 30
MARGINS: Final[Mapping[Dtype, tuple[float, float]]] = {
    Dtype.FP32: (50.0, 50.0),
    Dtype.FP16: (4.0, 5.0),
    Dtype.BF16: (2.0, 3.0),
}

Bounds = tuple[Tolerance, Tolerance]
# Of keys and of values. The same stack: one token against 256-token steps of the same machine. Another: the same against
# steps on one with other instructions, kernels and number of threads.
SAME_STACK: Final[Mapping[Dtype, Bounds]] = {
    Dtype.FP32: (Tolerance(2.5e-05, 9.1e-05), Tolerance(5.6e-05, 2.3e-04)),  # measured 5.0e-07, 1.8e-06; 1.1e-06, 4.7e-06
    Dtype.FP16: (Tolerance(2e-03, 2e-02), Tolerance(4e-03, 4e-02)),  # measured 2.5e-04, 2.6e-03; 5.2e-04, 5.4e-03
    Dtype.BF16: (Tolerance(1.5e-02, 9.4e-02), Tolerance(3.1e-02, 1.9e-01)),  # measured 7.6e-03, 3.1e-02; 1.5e-02, 6.2e-02
}
OTHER_STACK: Final[Mapping[Dtype, Bounds]] = {
    Dtype.FP32: (Tolerance(3.0e-05, 1.6e-04), Tolerance(6.7e-05, 3.7e-04)),  # measured 6.1e-07, 3.2e-06; 1.3e-06, 7.5e-06
    Dtype.FP16: (Tolerance(4e-03, 4e-02), Tolerance(8e-03, 8e-02)),  # not measured: twice those of the same stack
    Dtype.BF16: (Tolerance(1.7e-02, 1.7e-01), Tolerance(3.6e-02, 3.7e-01)),  # measured 8.5e-03, 5.8e-02; 1.8e-02, 1.2e-01
}


def tolerances(dtype: Dtype, layers: int, *, same_stack: bool) -> Bounds:
    """Return the bounds of keys and of values for a model of ``layers`` layers."""
    keys, values = (SAME_STACK if same_stack else OTHER_STACK)[dtype]
    return keys.of_layers(layers), values.of_layers(layers)
