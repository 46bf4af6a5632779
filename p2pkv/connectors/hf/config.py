"""Which parts of a checkpoint's ``config.json`` change KV values, in one canonical form (``docs/spec/model-id.md``).

A field counts unless it is on the list of those known not to matter: an unknown field costs a hit at worst, a forgotten one
a wrong answer. Rope parameters mean the same in their old form (``rope_theta`` and ``rope_scaling``) and in their new one
(``rope_parameters``), and are described in the new one. Absent fields stay absent, since their defaults belong to the code of
the model's type. Nothing here depends on the installed transformers: every engine that reads the folder describes it alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from p2pkv.errors import ModelUnsupportedError
from p2pkv.formats import dagcbor
from p2pkv.keys import canonical_config

# Fields that cannot change a KV value at inference. A field whose name means other things in other models (top_k, temperature,
# max_length, dropout of routers, ...) is left out of this list on purpose, and counts.
IGNORED_FIELDS: Final = frozenset(
    {
        # names and provenance
        "_name_or_path",
        "_model_name_or_path",
        "_commit_hash",
        "name_or_path",
        "transformers_version",
        # the dtype that is computed in is a part of the model id of its own
        "dtype",
        "torch_dtype",
        # what forward returns
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        # the output head: KV is complete before it; a checkpoint's own head is in the weights digest anyway
        "tie_word_embeddings",
        # special tokens: they steer the tokenizer and generation; the ids that are computed on are in the chain key
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "decoder_start_token_id",
        "tokenizer_class",
        # training only: initial values, and dropout, which prefill refuses to run with
        "initializer_range",
        "initializer_factor",
        "gradient_checkpointing",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "hidden_dropout",
        "hidden_dropout_prob",
        "activation_dropout",
        "classifier_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        # classification heads
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        # generation settings that older versions kept here
        "do_sample",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "repetition_penalty",
        "length_penalty",
        "diversity_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "early_stopping",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
        "return_dict_in_generate",
        "output_scores",
    }
)
# Rope types whose angles depend on the position alone. "dynamic" and "longrope" (once "su") switch with the length of the
# whole text, so that early KV depends on later tokens; a type that is not known here may do so too.
STATIC_ROPE_TYPES: Final = frozenset({"default", "linear", "llama3", "yarn"})
# Rope types that scale from the length the model was trained at, by default max_position_embeddings.
_SCALED_ROPE_TYPES: Final = frozenset({"llama3", "yarn"})
_ROPE_FIELDS: Final = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_DECODER_SUFFIXES: Final = ("ForCausalLM", "LMHeadModel")


def describe_config(config: Mapping[str, object]) -> dict[str, dagcbor.Value]:
    """Return the canonical description of ``config``, the parsed ``config.json``.

    Raises ModelUnsupportedError for a model that is no causal decoder, or whose early KV depends on what follows;
    UsageError for a value that is not JSON.
    """
    check_decoder(config)
    kept = {name: value for name, value in config.items() if name not in IGNORED_FIELDS and name not in _ROPE_FIELDS}
    rope = _rope_parameters(config)
    if rope:
        kept["rope_parameters"] = rope
    return canonical_config(kept)


def check_decoder(config: Mapping[str, object]) -> None:
    """Raise ModelUnsupportedError unless ``config`` describes one causal decoder over token ids alone."""
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if not names:
        raise ModelUnsupportedError("the config names no architecture")
    for name in names:
        if not name.endswith(_DECODER_SUFFIXES):
            raise ModelUnsupportedError(f"{name} is not a causal decoder over text alone")
    if config.get("is_encoder_decoder") or config.get("is_decoder") is False:
        raise ModelUnsupportedError(f"{names[0]} is not configured as a decoder")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise ModelUnsupportedError(f"{names[0]} attends to later tokens")
    for part in ("text_config", "vision_config", "audio_config"):
        if part in config:
            raise ModelUnsupportedError(f"{names[0]} has a {part}: its KV may depend on more than token ids")


def _rope_parameters(config: Mapping[str, object]) -> dict[str, object]:
    """Return the rope parameters in the new form, empty where the config has none. Raises ModelUnsupportedError."""
    rope: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if isinstance(given, Mapping):
            rope.update(given)
    shared = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    if any(isinstance(value, Mapping) for value in rope.values()):  # one set of parameters per kind of layer
        return {
            kind: _one_rope({**shared, **value}, config) if isinstance(value, Mapping) else value
            for kind, value in rope.items()
        }
    return _one_rope({**shared, **rope}, config) if rope or shared else {}


def _one_rope(parameters: dict[str, object], config: Mapping[str, object]) -> dict[str, object]:
    result = {name: value for name, value in parameters.items() if name != "type"}
    rope_type = result.setdefault("rope_type", parameters.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in STATIC_ROPE_TYPES:
        raise ModelUnsupportedError(f"rope type {rope_type!r}: early KV may depend on how long the text becomes")
    if rope_type in _SCALED_ROPE_TYPES:
        length = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        result.setdefault("original_max_position_embeddings", length)
    return result
