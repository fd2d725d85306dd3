"""Engines for TensorFlow and Keras 3 over `tf.distribute`. Importing this package alone imports no framework.

`tensorflow_engine` is the base of all engines, `coordinator_engine` that of engines with a chief. `strategy_engines`,
`tpu`, `keras_fit` (Keras' own `fit`, one step at a time), `fit_workers` (it on several workers) and `ps/` have the
engines; `custom_loop` makes a model for `fit` of a user's loop. `training/` has the training step: `train_state` (model
and optimizer), `objective` (losses), `train_function` (the compiled step), `evaluation`, `checkpoint_files`.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hide start messages; errors are still printed
