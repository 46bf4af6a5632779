"""Bytes and their meaning: CIDs, strict DAG-CBOR, manifests, envelopes, segments, tensors. ``docs/spec/`` is the truth."""
