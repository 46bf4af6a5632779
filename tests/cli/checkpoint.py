"""A tiny random Llama with a byte tokenizer, as a checkpoint folder: one token a byte, and a BOS token where asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS = 256


def save_checkpoint(folder: Path, *, seed: int = 0, bos: bool = False) -> Path:
    """Write the checkpoint in fp32; equal arguments give equal bytes."""
    config = LlamaConfig(
        vocab_size=BOS + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=BOS,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # attention matters, so that wrong caches show
    model.save_pretrained(folder)
    _tokenizer(bos).save_pretrained(folder)
    return folder


def _tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": BOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106  # no password
    )
