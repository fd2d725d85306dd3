"""The executable specification of `trainwright.core.engine`: engines in numpy float64, without a framework.

`registration` offers them to the planner as the framework `reference`, also in the job files of tests.

numpy has no autograd, so a job for these engines gives derivatives along with its values:

- `model`: () -> a `ReferenceModel`, such as `Mlp(sizes)`; the engine initializes it from the job's seed.
- `loss`: (outputs, targets) -> `LossWithGradient(values, gradient, weights)`, where `gradient` is the derivative of
  each value with respect to the outputs that it depends on. `cross_entropy` and `squared_error` are such losses.
- `optimizer`: (parameters by name) -> `Sgd(...)` or `Adam(...)`, settings with a pure `update`.
- `step`: (model, batch of columns) -> `LossWithGradient`; it calls the model once, and `gradient` is by its outputs.
- `metrics`: (outputs, targets) -> values of shape (rows,) or (rows, k), or Terms.

| engine                    | topology    | forms again | data ranks of a worker       |
|---------------------------|-------------|-------------|------------------------------|
| `collective:Reference`    | collective  | in place    | 1                            |
| `independent:Independent` | independent | in place    | 1, against parameter servers |
"""
