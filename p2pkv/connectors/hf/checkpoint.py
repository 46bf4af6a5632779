"""A checkpoint folder with its tokenizer: load it, turn texts into prompts, and generate greedily.

Publisher and consumer have to make the same token ids of a text, so both make them here: the text's own ids, with the BOS
token in front where the tokenizer puts one itself (as Llama's does), nothing behind, and no chat template. A question is
tokenized by itself, so that the ids of a document and a question begin with exactly the ids of the document.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from p2pkv.connectors.hf.geometry import TORCH_DTYPES
from p2pkv.connectors.hf.prefill import last_logits
from p2pkv.errors import ModelUnsupportedError, UsageError
from p2pkv.formats.tensors import Dtype

# What transformers raises for a folder that it cannot load, beside its own bugs.
_LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model in evaluation mode, and the tokenizer of its folder."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def document_ids(self, text: str) -> list[int]:
        """Return the token ids of a text that a prompt begins with: what is published of it. Raises UsageError if empty."""
        opening = self._ids("", special=True)[:1]
        starts_with_bos = opening and opening[0] == self.tokenizer.bos_token_id
        ids = [*(opening if starts_with_bos else ()), *self._ids(text)]
        if not ids:
            raise UsageError("the text has no tokens", advice="Name a file with text in it.")
        return ids

    def question_ids(self, question: str) -> list[int]:
        """Return the token ids of a question about the document before it, up to where the answer begins."""
        return self._ids(f"\n\nQuestion: {question}\nAnswer:")

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, special tokens left out."""
        return cast("str", self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def check_length(self, token_count: int) -> None:
        """Raise UsageError for more tokens than the model was made for: it would go on, and say nonsense."""
        most = getattr(self.model.config, "max_position_embeddings", None)
        if isinstance(most, int) and token_count > most:
            raise UsageError(
                f"{token_count} tokens exceed the {most} that this model was made for", advice="Shorten the text."
            )

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        # Without `verbose` the tokenizer warns of lengths that are checked elsewhere.
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def load_checkpoint(folder: Path, dtype: Dtype, *, device: str = "cpu") -> Checkpoint:
    """Load the checkpoint in ``folder`` in ``dtype`` on ``device``; nothing is downloaded and no code of the folder is run.

    Raises UsageError where there is none or torch knows no such device, ModelUnsupportedError where transformers cannot load
    it or finds no weights for a part of it.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is no checkpoint folder: it has no config.json", advice="Name a folder with a model.")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UsageError(f"{device!r} is no device", advice="Say cpu, cuda or cuda:1.") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no CUDA device here", advice="Run on the CPU, or install torch with CUDA.")
    try:
        with _quiet():
            # A model in evaluation mode. What the files lack would be filled with random numbers, so it is asked for.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=TORCH_DTYPES[dtype], local_files_only=True, use_safetensors=True, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except _LOAD_ERRORS as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelUnsupportedError(
            f"transformers cannot load {folder}: {reason}",
            advice="Check that the folder is a whole checkpoint with tokenizer.",
        ) from error
    model, found = loaded
    if found["missing_keys"] or found.get("mismatched_keys"):
        lacking = sorted(map(str, [*found["missing_keys"], *found.get("mismatched_keys", ())]))
        raise ModelUnsupportedError(
            f"{folder} has no weights for {lacking[0]} and {len(lacking) - 1} others",
            advice="Copy the checkpoint again, whole.",
        )
    return Checkpoint(model.to(place), tokenizer)


def greedy(model: PreTrainedModel, token_ids: Sequence[int], cache: DynamicCache, count: int) -> Iterator[int]:
    """Yield up to ``count`` greedy tokens after ``token_ids``, each as soon as it is known; an end token ends it unsaid.

    ``cache`` holds the tokens before the prompt's last canonical step and grows with each token. Raises as ``prefill`` does.
    """
    ends = _end_tokens(model)
    ids = list(token_ids)
    for _ in range(count):
        token = int(last_logits(model, ids, cache).argmax())
        if token in ends:
            return
        yield token
        ids.append(token)


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return frozenset(ends if isinstance(ends, list | tuple) else (ends,))
    return frozenset()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and hints off stderr, which belongs to the caller; what fails still raises."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
