"""What other packages use of this connector, in one place. Importing it imports torch and transformers."""

from p2pkv.connectors.hf.cache import KVBuffer, check_cache, extract_layer
from p2pkv.connectors.hf.deviations import compare_caches, spot_check
from p2pkv.connectors.hf.geometry import ModelGeometry, geometry, open_cache
from p2pkv.connectors.hf.live import last_model_id, model_id_of
from p2pkv.connectors.hf.model_id import checkpoint_model_id, tokenizer_digest
from p2pkv.connectors.hf.pace import Pace
from p2pkv.connectors.hf.prefill import canonical_steps, last_logits, prefill
from p2pkv.connectors.hf.recompute import check_recomputable
from p2pkv.connectors.hf.stack import producer_stack
from p2pkv.connectors.hf.versions import cache_argument

__all__ = [
    "KVBuffer",
    "ModelGeometry",
    "Pace",
    "cache_argument",
    "canonical_steps",
    "check_cache",
    "check_recomputable",
    "checkpoint_model_id",
    "compare_caches",
    "extract_layer",
    "geometry",
    "last_logits",
    "last_model_id",
    "model_id_of",
    "open_cache",
    "prefill",
    "producer_stack",
    "spot_check",
    "tokenizer_digest",
]
