"""The floor under a cold start: import torch, load one TorchScript file, answer once.

`python bare_start.py FILE WIDTH`; prints nothing, the caller times the whole process up to its line "ready".
"""

from __future__ import annotations

import sys

import torch

torch.set_num_threads(1)
model = torch.jit.load(sys.argv[1])
with torch.inference_mode():
    model(torch.zeros(1, int(sys.argv[2])))
print("ready", flush=True)
