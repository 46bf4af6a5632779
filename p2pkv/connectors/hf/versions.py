"""The supported transformers versions, and what differs between them.

5.24 renamed the cache argument and output of ``forward`` and ``generate`` from ``past_key_values`` to ``cache``, and models
written for older versions keep the old name; so the name is asked of the model. ``Cache.crop`` changed its meaning within the
range, so this connector never crops. What else it touches (``DynamicCache(config=...)``, ``layers``, ``DynamicLayer``'s
``keys``, ``values`` and ``lazy_initialization``) is the same at both ends, and ``tests/hf`` runs at both ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Final

import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from p2pkv.errors import MachineError, ModelUnsupportedError

# The same range stands in pyproject.toml: transformers>=5.19,<5.25. Major and minor number decide, so that release
# candidates and local builds of a supported version count as that version.
OLDEST: Final = (5, 19)
NEWEST: Final = (5, 24)


@cache
def check_version(version: str = transformers.__version__) -> None:
    """Raise MachineError where the installed transformers is outside the range that the tests cover."""
    release = (*Version(version).release, 0)[:2]
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise MachineError(
            f"transformers {version} is not supported: its caches were checked from {oldest} to {newest} only",
            advice=f"Install it with `pip install 'transformers>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'`.",
        )


def forward_parameters(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which ``model.forward`` and ``model.generate`` take a cache: ``cache`` or ``past_key_values``.

    Raises MachineError for an unsupported transformers, ModelUnsupportedError where ``forward`` takes no cache.
    """
    check_version()
    parameters = forward_parameters(model)
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ModelUnsupportedError(f"{type(model).__name__}.forward takes no cache")
