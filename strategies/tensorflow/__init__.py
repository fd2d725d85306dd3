"""Engines for TensorFlow and Keras 3 over `tf.distribute`. Importing this package alone imports no framework.

`base` holds what all engines share. `training/` holds the training step: `train_state` (model and optimizer),
`objective` (losses as terms), `train_function` (the compiled step), `evaluation`, `checkpoint_files`. The engines are
`one_device`, `mirrored`, `central_storage`, `multi_worker`, `tpu` and `keras_fit` (a walk of Keras' own `fit`); those
with parameter servers and a coordinator are in `ps/`.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its greetings are no news; errors are still told
