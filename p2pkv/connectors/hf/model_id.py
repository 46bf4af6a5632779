"""The model id of a checkpoint folder: what changes KV values, and nothing else (``docs/spec/model-id.md``).

Needs neither torch nor transformers. The id of a live model is :func:`p2pkv.connectors.hf.live.model_id_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import platformdirs

from p2pkv.connectors.hf.config import describe_config
from p2pkv.connectors.hf.weights import cached_weights_digest, read_json, weight_files, weights_digest
from p2pkv.errors import StoreError
from p2pkv.formats import dagcbor
from p2pkv.formats.hashing import digest, domain_hash
from p2pkv.formats.tensors import Dtype
from p2pkv.keys import canonical_config, model_id

_ADAPTER_DOMAIN: Final = "p2pkv/adapter/v1"
# Fields of an adapter's config that name where it came from, or matter in training only.
_IGNORED_ADAPTER_FIELDS: Final = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "init_lora_weights", "lora_dropout", "peft_version", "task_type"}
)


def default_cache_folder() -> Path:
    """Return the platform's folder for things that can be computed again."""
    return platformdirs.user_cache_path("p2pkv")


def checkpoint_model_id(
    folder: Path,
    *,
    compute_dtype: Dtype,
    kv_dtype: Dtype | None = None,
    adapters: Sequence[Path] = (),
    cache_folder: Path | None = None,
) -> bytes:
    """Return the 32-byte model id of the checkpoint in ``folder``, as any engine that loads it computes.

    ``kv_dtype`` is the compute dtype where it is not given; ``adapters`` are PEFT folders in the order they apply.
    Raises ModelUnsupportedError, FormatError and TruncatedError for a damaged checkpoint, StoreError where it cannot be read.
    """
    description = describe_config(read_json(folder / "config.json"))
    weights = cached_weights_digest(weight_files(folder), cache_folder or default_cache_folder())
    return described_model_id(description, weights, compute_dtype, kv_dtype, [adapter_digest(adapter) for adapter in adapters])


def described_model_id(
    description: Mapping[str, dagcbor.Value],
    weights: bytes,
    compute_dtype: Dtype,
    kv_dtype: Dtype | None,
    adapters: Sequence[bytes] = (),
) -> bytes:
    """Return the model id of a described config and a weights digest, wherever they come from."""
    return model_id(
        dict(description), weights, compute_dtype=compute_dtype, kv_dtype=kv_dtype or compute_dtype, adapters=adapters
    )


def adapter_digest(folder: Path) -> bytes:
    """Return the 32-byte digest of a PEFT adapter: its config and its weights. Raises as :func:`checkpoint_model_id` does."""
    config = read_json(folder / "adapter_config.json")
    kept = canonical_config({name: value for name, value in config.items() if name not in _IGNORED_ADAPTER_FIELDS})
    return domain_hash(_ADAPTER_DOMAIN, dagcbor.encode(kept), weights_digest(weight_files(folder, "adapter_model")))


def tokenizer_digest(folder: Path) -> bytes | None:
    """Return the BLAKE3 of ``tokenizer.json``, for information in manifests; ``None`` where there is none."""
    path = folder / "tokenizer.json"
    try:
        return digest(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}", advice="Check the checkpoint folder.") from None
