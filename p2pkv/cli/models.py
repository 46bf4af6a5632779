"""Models for commands: the connector is imported only when one is loaded, and its absence is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from p2pkv.errors import MachineError
from p2pkv.formats.tensors import Dtype

if TYPE_CHECKING:
    from p2pkv.connectors.hf.checkpoint import Checkpoint


def load(folder: Path, dtype: Dtype, device: str) -> Checkpoint:
    """Return the checkpoint in ``folder``. Raises MachineError without torch and transformers, and as load_checkpoint does."""
    try:
        from p2pkv.connectors.hf.checkpoint import load_checkpoint
    except ModuleNotFoundError as error:
        raise MachineError(
            f"this command needs the Python package {error.name}", advice="Install it with `pip install 'p2pkv[hf]'`."
        ) from None
    return load_checkpoint(folder.expanduser(), dtype, device=device)
