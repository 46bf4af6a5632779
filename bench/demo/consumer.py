"""The demo's consumer: answers a question about the document twice, with a local prefill and with one loaded from peers.

Prints one JSON object. Both ways use the same model object, the same canonical steps and the same greedy decoding; time to
first token counts from the call with token ids to the first new token, look-up, transfer and verification included.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from p2pkv.client.sync import Client
from p2pkv.connectors.hf import api as hf

QUESTION = "\n\nQuestion: What does this document establish?\nAnswer:"
NEW_TOKENS = 64


def read_prompt(model_folder: Path, document: Path) -> tuple[list[int], int]:
    """Return the prompt's token ids and the length of the document in it, which is what others share."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    shared = tokenizer(document.read_text(), add_special_tokens=False).input_ids
    return [*shared, *tokenizer(QUESTION, add_special_tokens=False).input_ids], len(shared)


def decode_greedily(model: PreTrainedModel, cache: DynamicCache, logits: torch.Tensor, count: int) -> list[int]:
    """Return ``count`` tokens after ``logits``, one canonical step of one token each."""
    tokens: list[int] = []
    name = hf.cache_argument(model)
    while True:
        tokens.append(int(logits.argmax()))
        if len(tokens) == count:
            return tokens
        with torch.no_grad():
            output = model(input_ids=torch.tensor([[tokens[-1]]]), use_cache=True, **{name: cache})
        logits = output.logits[0, -1]


def local_prefill(model: PreTrainedModel, ids: list[int], shared: int) -> tuple[DynamicCache, torch.Tensor]:
    cache = hf.open_cache(model)
    return cache, hf.prefill(model, ids, cache, hf.canonical_steps(len(ids), shared=shared))


def run(folder: Path, document: Path, home: Path, dtype: str, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure one dtype and return the raw row."""
    ids, shared = read_prompt(folder, document)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    # Kernels choose and pack on their first call: both ways get warm ones. The model's id is worked out once per model.
    local_prefill(model, ids[:512], 256)
    hf.model_id_of(model)

    started = time.perf_counter()
    cache, local_logits = local_prefill(model, ids, shared)
    int(local_logits.argmax())
    ttft_local = time.perf_counter() - started
    local_tokens = decode_greedily(model, cache, local_logits, NEW_TOKENS)
    del cache

    with Client(home) as client:
        client.status()  # the connection of a program that has been running for a while
        started = time.perf_counter()
        prefill = client.prefill(model, ids, shared=shared, on_event=on_event)
        loaded = time.perf_counter() - started
        loaded_logits = hf.last_logits(model, ids, prefill.cache)
        int(loaded_logits.argmax())
        ttft_p2p = time.perf_counter() - started
    loaded_tokens = decode_greedily(model, prefill.cache, loaded_logits, NEW_TOKENS)

    report = prefill.report
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {
        "dtype": dtype,
        "prompt_tokens": len(ids),
        "document_tokens": shared,
        "hit_tokens": report.hit_tokens,
        "ttft_local_s": ttft_local,
        "ttft_p2p_s": ttft_p2p,
        "loaded_s": loaded,
        "identical_tokens": next((i for i in range(NEW_TOKENS) if local_tokens[i] != loaded_tokens[i]), NEW_TOKENS),
        "logits_equal": int(torch.equal(local_logits, loaded_logits)),
        "answer_local": str(tokenizer.decode(local_tokens)).strip(),
        "answer_p2p": str(tokenizer.decode(loaded_tokens)).strip(),
        "report": str(report),
        "miss": report.miss,
        "bytes_by_peer": dict(report.bytes_by_peer),
        "rate_by_peer": dict(report.rate_by_peer),
        "blocks_refused": report.blocks_refused,
        "peers_lost": report.peers_lost,
        "peers_dropped": list(report.peers_dropped),
        "times": dict(report.times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("document", type=Path)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--dtype", required=True, choices=["bfloat16", "float32"])
    parser.add_argument("--kill", type=int, help="process to kill when the first segment is here")
    options = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # its bars would end up in the demo's output
    victim = options.kill

    def on_event(event: dict[str, Any]) -> None:
        nonlocal victim
        if victim is not None and event["event"] == "segment":
            os.kill(victim, signal.SIGKILL)
            victim = None

    print(json.dumps(run(options.model, options.document, options.home, options.dtype, on_event)))


if __name__ == "__main__":
    main()
