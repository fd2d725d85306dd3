"""Engines for torch: `one_device`, `data_parallel` and `sharded`. Importing this package alone imports no framework.

Read in this order: `base` (what the engines share), `replica` (model, optimizer and where they stand), `objective`
(losses as terms, and what travels with the gradients), `step` (one step), `state` and `files` (copies and
checkpoints), `group` (the process group's life), `data_parallel`; then `parts` (which rows a rank holds), `dividing`
(what FSDP2 is told, and what it does not tell) and `sharded`; `dynamo` keeps start-up short.
"""

from __future__ import annotations

import os

# torch's own switch, read at its first allocation: large tensors in pages of 2 MiB, where the system allows that. A
# state of 1.2 GB then reaches a new process in two thirds of the time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
