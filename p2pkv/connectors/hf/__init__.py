"""The Hugging Face connector: model ids, canonical prefill, extraction from and injection into transformers caches.

``config``, ``weights`` and ``model_id`` read checkpoint folders and need neither torch nor transformers; the rest needs both.
"""
