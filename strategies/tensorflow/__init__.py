"""Engines for TensorFlow and Keras 3 over `tf.distribute`. Importing this package alone imports no framework.

Read in this order: `base` (what all engines share), `replica` (model, optimizer and where they stand), `objective`
(losses as terms), `program` (the compiled step), `evaluation`, `files` (copies and checkpoints), then the strategies:
`one_device`, `mirrored`, `central_storage`, `multi_worker`. Where one process leads others (`led`, which
knows them by their `seats`): `parameter_server` with its variables (`served`) and steps (`shares`), and `tpu`.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its greetings are no news; errors are still told
