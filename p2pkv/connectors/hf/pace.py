"""How fast this machine prefills a model, measured while it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from p2pkv.connectors.hf.geometry import layer_devices
from p2pkv.connectors.hf.prefill import Step
from p2pkv.limits import SEGMENT_TOKENS


class Pace:
    """An ``on_step`` for the prefill of ``steps``; ``clock`` gives seconds.

    It looks at the whole steps at the front of a text, from the second on: the first one warms the kernels up, a short one
    takes as long as a whole one, and one further back takes longer than the loaded tokens before it would have.
    """

    def __init__(
        self, model: PreTrainedModel, steps: Sequence[Step], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = layer_devices(model)[-1]
        self._clock = clock
        self._end = 0
        for step in steps:
            if step != (self._end, self._end + SEGMENT_TOKENS):
                break
            self._end += SEGMENT_TOKENS
        self._times: list[float] = []

    def __call__(self, start: int, end: int) -> None:
        if self._end > SEGMENT_TOKENS and end in (SEGMENT_TOKENS, self._end):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # it computes behind our back
            self._times.append(self._clock())

    @property
    def tokens_per_s(self) -> float | None:
        """``None`` where too little was computed to tell."""
        match self._times:
            case [first, last] if last > first:
                return (self._end - SEGMENT_TOKENS) / (last - first)
            case _:
                return None
