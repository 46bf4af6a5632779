"""What besides the model decides the last bits of KV values: the software and hardware that computed them.

Equal stacks give equal bits; a difference in any field may show in them. Threads are a field because matrix products are split
over them: with bf16 on a CPU with AMX each value depends on their number, and in fp32 those of short steps do.
"""

from __future__ import annotations

import platform

import torch
import transformers
from transformers import PreTrainedModel


def producer_stack(model: PreTrainedModel) -> dict[str, str]:
    """Return the stack that ``model`` computes on, as short texts by name, for a manifest and for comparison with one."""
    stack = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "attention": str(model.config._attn_implementation),
    }
    if model.device.type == "cuda":
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        return stack | {
            "device": torch.cuda.get_device_name(model.device),
            "cuda": str(torch.version.cuda),
            "matmul": precision,
        }
    matrix_unit = "+AMX" if model.device.type == "cpu" and torch.cpu._is_amx_tile_supported() else ""
    return stack | {
        "device": model.device.type,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability() + matrix_unit,
        "threads": str(torch.get_num_threads()),
    }
