"""A job's loss and metrics of outputs that are there already, as arrays; see `strategies.torch.marking`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from trainwright.core.data import Batch, Terms
from trainwright.core.engine import ModelSpec
from trainwright.strategies.tensorflow.training import batches
from trainwright.strategies.tensorflow.training.evaluation import LOSS
from trainwright.strategies.tensorflow.training.objective import Caller


def marked(spec: ModelSpec, batch: Batch, outputs: Any, only: str = "") -> Terms:
    """The terms of a metric, or of the loss without what regularizers add."""
    caller = Caller(spec=spec, where=only or LOSS)
    named = isinstance(outputs, Mapping)
    given: Any = {name: batches.tensor(name, each) for name, each in (outputs if named else {"": outputs}).items()}
    given = given if named else given[""]
    weighed = (spec.sample_weight,) if spec.sample_weight else ()
    columns = batches.columns_of(spec.collation, batch, dict.fromkeys((*spec.targets, *weighed)))
    weights = tf.convert_to_tensor(batch.weights)
    if only:
        found = caller.metric(only, given, columns, weights)
    else:
        found = caller.terms("loss=", caller.applied("loss=", spec.loss, given, caller.targets(columns)), weights)
        found = caller.weighted(found, caller.factors(columns, training=False))
    return Terms(*(np.asarray(tf.cast(each, tf.float64)) for each in found))
