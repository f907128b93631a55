"""Whether an exception says that memory was lacking: by its type, or by the words of those who have none.

torch has a type for it only where its own allocator of a GPU ran out, and TorchScript makes a text of all it
raises. Other errors of a GPU, as of a kernel that was given something impossible, say nothing of memory.
"""

from __future__ import annotations

import torch

from torchere.serving.execution.plain import plain_text

_WORDS = (
    "out of memory",  # "CUDA out of memory", "CUDA error: out of memory", and so of other makers
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN and their like, for the memory they work in
    "_ALLOCATION_FAILED",  # cuDNN from 9 on
    "DefaultCPUAllocator: ",  # it has nothing else to say, in two spellings
    "Failed to allocate memory for requested buffer",  # onnxruntime, on whatever device
    " is smaller than requested bytes of ",  # onnxruntime, where it may take so much of a GPU only
)


def lacks_memory(err: BaseException) -> bool:
    """Whether what was to be done may work where there is more memory, or less is asked for."""
    if isinstance(err, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = plain_text(err)
    return any(words in text for words in _WORDS)
