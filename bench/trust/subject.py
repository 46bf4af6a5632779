"""The real model, texts, and their KV as tensors: what an honest publisher has."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.smollm2 import ensure_model
from p2pkv.connectors.hf import api as hf
from p2pkv.connectors.hf.cache import layer_tensors
from p2pkv.connectors.hf.deviations import mean_squares
from p2pkv.connectors.hf.geometry import TORCH_DTYPES
from p2pkv.connectors.hf.recompute import recompute
from p2pkv.formats.tensors import Dtype

KV = tuple[Tensor, Tensor]

_ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = _ROOT / "bench" / "demo" / "constitution.txt"
# Recomputed at once where all positions of a text are.
_AT_ONCE: Final = 256


def load(dtype: Dtype, **options: Any) -> LlamaForCausalLM:
    """Return SmolLM2-135M in ``dtype``, in evaluation mode."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    model = AutoModelForCausalLM.from_pretrained(ensure_model(), dtype=TORCH_DTYPES[dtype], **options)
    assert isinstance(model, LlamaForCausalLM), "SmolLM2 is a Llama"
    return model


def texts(tokens: int) -> dict[str, list[int]]:
    """Return the first ``tokens`` token ids of a document, a licence, a program, and as many random ones, by name."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    sources = {"document": DOCUMENT, "licence": _ROOT / "LICENSE", "program": Path(heapq.__file__)}
    found = {
        name: list(tokenizer(source.read_text(), add_special_tokens=False, verbose=False).input_ids)[:tokens]
        for name, source in sources.items()
    }
    return {**found, "random": random.Random(5).choices(range(len(tokenizer)), k=tokens)}


@dataclass(frozen=True)
class Subject:
    """One text of one model: what an honest publisher computes of it, keys and values ``[1, heads, tokens, dim]`` by layer."""

    model: LlamaForCausalLM
    token_ids: list[int]
    honest: list[KV]

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def compute(model: LlamaForCausalLM, token_ids: Sequence[int]) -> list[KV]:
    """Prefill ``token_ids`` canonically and return the KV."""
    cache = hf.open_cache(model)
    hf.prefill(model, token_ids, cache, hf.canonical_steps(len(token_ids)))
    return layer_tensors(cache)


def subject(model: LlamaForCausalLM, token_ids: list[int]) -> Subject:
    return Subject(model, token_ids, compute(model, token_ids))


@dataclass(frozen=True)
class Measured:
    """Mean squares of difference and scale of keys and of values, ``[layers, tokens]`` each."""

    keys: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]


def measure(found: Subject, given: Sequence[KV], on_chunk: Callable[[], None] = lambda: None) -> Measured:
    """Recompute every token of ``found`` over ``given`` and compare, as ``verify=sample`` does with those that it draws."""
    cache = hf.open_cache(found.model)
    for layer, (keys, values) in enumerate(given):
        cache.update(keys, values, layer)
    parts: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for start in range(0, found.tokens, _AT_ONCE):
        end = min(start + _AT_ONCE, found.tokens)
        recomputed = recompute(found.model, found.token_ids, cache, range(start, end))
        for half in (0, 1):
            theirs = [kv[half][0, :, start:end] for kv in given]
            parts[half].append(mean_squares(theirs, [kv[half] for kv in recomputed]))
        on_chunk()
    joined = [tuple(torch.cat([part[i] for part in half], dim=1) for i in (0, 1)) for half in parts]
    return Measured((joined[0][0], joined[0][1]), (joined[1][0], joined[1][1]))
