"""Engines for torch. Importing this package alone imports no framework.

`engines/` holds one engine for each strategy and what they share. `training/` holds the training step: `train_state`
(model and optimizer), `objective` (losses as terms), `train_step`. `checkpoint/` holds copies and files of state,
`distributed/` process groups and FSDP2; `pipeline/`, `tensor_parallel/` and `ps/` hold what these strategies need.
`tracing/` runs models without data, `profiling` derives their costs. `shard_layout`, `torch_errors` and `torch_compat`
are below all of them.
"""

from __future__ import annotations

import os

# torch's own switch, read at its first allocation: large tensors in pages of 2 MiB, where the system allows that. A
# state of 1.2 GB then reaches a new process in two thirds of the time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
