"""A model's variables on parameter servers, and the optimizer that updates them there.

The chief holds a whole replica, which lends names, checkpoints and the model's code; what is trained lies on the
servers. A variable is cut by rows among them where a piece is large enough (`MinSizePartitioner`), and each piece has
the optimizer's slots beside it, so that a worker sends gradients and nothing else. Only an optimizer that looks at each
number by itself may have its variables cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainwright.strategies.tensorflow.training import batches
from trainwright.strategies.tensorflow.training.error_mapping import user_code
from trainwright.strategies.tensorflow.training.train_state import Replica, built

MIN_PIECE_BYTES = 256 << 10  # of a variable that is cut
_optimizers = keras.optimizers
BY_NUMBER = (
    _optimizers.SGD, _optimizers.Adam, _optimizers.AdamW, _optimizers.Adamax, _optimizers.Nadam, _optimizers.RMSprop,
    _optimizers.Adagrad, _optimizers.Adadelta, _optimizers.Ftrl, _optimizers.Lion,
)  # fmt: skip
Pieces = tuple[keras.Variable, ...]


class Served:
    """The variables of a replica on servers, with the values that it has.

    Args:
        replica: of the chief.
        strategy: a `ParameterServerStrategy`, which places variables on the servers in turn.
        servers: how many there are.

    Attributes:
        trained, state: of each of the replica's variables of that kind its pieces, in the order of rows.
        optimizer: the user's, of the pieces.
    """

    def __init__(self, replica: Replica, strategy: tf.distribute.Strategy, servers: int) -> None:
        self._replica, self._strategy = replica, strategy
        self._partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(MIN_PIECE_BYTES, servers)
        self._may_cut = type(replica.optimizer) in BY_NUMBER and replica.optimizer.clipnorm is None
        with strategy.scope():
            self.trained = [self._put(variable) for variable in replica.model.trainable_variables]
            self.state = [self._put(variable) for variable in replica.state]
            assert replica.spec.optimizer is not None, "the replica has one"
            with user_code("optimizer()", replica.where):
                self.optimizer = replica.spec.optimizer(self.pieces)
            slots = built(self.optimizer, self.pieces)
        self.optimizer._all_reduce_sum_gradients = lambda pairs: pairs  # a share's gradient is an update of its own
        self.optimizer._get_current_learning_rate = lambda: self._rate
        count = self.optimizer.iterations
        count.assign_add = count.value.assign_add  # Keras reads, adds and writes, and so loses others' counts
        self._pairs = [*zip(replica.model.trainable_variables, self.trained, strict=True)]
        self._pairs += zip(replica.state, self.state, strict=True)
        self._pairs += self._of_optimizer(slots)
        self._rate: Any = None

    @property
    def pieces(self) -> list[keras.Variable]:
        """Of all that is trained."""
        return [piece for pieces in self.trained for piece in pieces]

    def pull(self) -> tuple[list[Any], list[Any]]:
        """What is trained, and the state that is not, whole: tensors of the graph that is being made."""
        return [_whole(pieces) for pieces in self.trained], [_whole(pieces) for pieces in self.state]

    def push(self, gradients: Sequence[Any], state: Sequence[Any], rate: Any) -> None:
        """Apply gradients of the whole variables with a learning rate, each piece on its server, and set the state."""
        self._rate = rate
        cut = [part for gradient, pieces in zip(gradients, self.trained, strict=True)
               for part in _split(gradient, pieces)]  # fmt: skip
        self._strategy.run(lambda parts: self.optimizer.apply(parts, self.pieces), args=(cut,))
        for (piece,), value in zip(self.state, state, strict=True):
            piece.value.assign(value)

    def fetch(self) -> None:
        """Give the chief's replica the values of the servers."""
        for variable, pieces in self._pairs:
            parts = [batches.array(tf.convert_to_tensor(piece.value)) for piece in pieces]
            variable.assign(np.concatenate(parts) if len(parts) > 1 else parts[0])

    def fill(self) -> None:
        """Give the servers the values of the chief's replica."""
        for variable, pieces in self._pairs:
            values = batches.array(variable.value)
            for piece, part in zip(pieces, _rows(values, [piece.shape for piece in pieces]), strict=True):
                piece.assign(part)

    def _put(self, variable: keras.Variable) -> Pieces:
        values: npt.NDArray[Any] = batches.array(variable.value)
        number = 1
        if self._may_cut and variable.trainable and variable.constraint is None and values.ndim:
            number = self._partitioner(tf.TensorShape(values.shape), tf.as_dtype(variable.dtype))[0]
        return tuple(self._piece(variable, part) for part in np.array_split(values, number)) if number > 1 else (
            self._piece(variable, values),
        )  # fmt: skip

    def _piece(self, variable: keras.Variable, values: npt.NDArray[Any]) -> keras.Variable:
        piece = keras.Variable(values, dtype=variable.dtype, trainable=variable.trainable, name=variable.name)
        piece.constraint = variable.constraint
        return piece

    def _of_optimizer(self, slots: Sequence[Sequence[keras.Variable]]) -> Iterator[tuple[keras.Variable, Pieces]]:
        """The variables of the chief's optimizer with their pieces; the learning rate is the chief's alone."""
        ends = list(accumulate(len(pieces) for pieces in self.trained))
        for own, end, pieces in zip(self._replica.slots, ends, self.trained, strict=True):
            of_pieces = slots[end - len(pieces) : end]
            for number, slot in enumerate(own):
                yield slot, tuple(each[number] for each in of_pieces)
        pairs = zip(_others(self._replica.optimizer, self._replica.slots), _others(self.optimizer, slots), strict=True)
        for variable, piece in pairs:
            yield variable, (piece,)


def _others(optimizer: Any, slots: Sequence[Sequence[keras.Variable]]) -> list[keras.Variable]:
    """An optimizer's variables that belong to none that is trained, but its learning rate."""
    known = {id(slot) for each in slots for slot in each} | {id(optimizer._learning_rate)}
    return [variable for variable in optimizer.variables if id(variable) not in known]


def _whole(pieces: Pieces) -> Any:
    parts = [tf.convert_to_tensor(piece.value) for piece in pieces]
    return tf.concat(parts, 0) if len(parts) > 1 else parts[0]


def _split(gradient: Any, pieces: Pieces) -> list[Any]:
    return tf.split(gradient, [piece.shape[0] for piece in pieces]) if len(pieces) > 1 else [gradient]


def _rows(values: npt.NDArray[Any], shapes: Sequence[Any]) -> list[npt.NDArray[Any]]:
    if len(shapes) == 1:
        return [values]
    return np.split(values, list(accumulate(shape[0] for shape in shapes))[:-1])
