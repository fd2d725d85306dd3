"""Engines for torch. Importing this package alone imports no framework.

`engines/` holds one engine for each strategy; `engines/base` holds what they share. `training/` holds the training
step: `train_state` (model and optimizer), `objective` (losses as terms), `step`. `checkpoint/` holds state and files,
`distributed/` process groups and FSDP, and `pipeline/`, `tensor_parallel/` and `ps/` what these strategies need.
`profiling/` measures models; `training/lazy_dynamo` keeps start-up short.
"""

from __future__ import annotations

import os

# torch's own switch, read at its first allocation: large tensors in pages of 2 MiB, where the system allows that. A
# state of 1.2 GB then reaches a new process in two thirds of the time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
