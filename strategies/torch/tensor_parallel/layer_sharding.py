"""One rank's layers in a tensor-parallel group: how they are divided, and which group they communicate in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.strategies.torch.shard_layout import ShardSlice
from trainwright.strategies.torch.tensor_parallel.layers import TensorParallelPlan, shard_layers
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup


class LayerSharding:
    """Divides the layers of a model over a tensor-parallel group.

    Args:
        index: this rank's number in the group.
        size: ranks of the group; 1 for none.
        process_group: in which they communicate.
        where: the rank, for errors.
    """

    def __init__(self, index: int, size: int, process_group: ProcessGroup | None, where: str) -> None:
        self._index, self._size, self._process_group, self._where = index, size, process_group, where
        self._group: TensorParallelGroup | None = None

    def plan(
        self,
        model: nn.Module,
        spec: ModelSpec,
        columns: Callable[[], Mapping[str, Tensor]],
        *,
        rows: int,
        sequence: bool,
    ) -> TensorParallelPlan:
        """Choose how the layers of a whole model are divided.

        Args:
            model: in host memory; it is not changed.
            spec: the job's functions, and its own plan where it has one.
            columns: gives the columns of a sample that the job's functions take, in host memory.
            rows: the fewest rows that the model takes.
            sequence: the ranks hold parts of the tokens between divided layers.

        Raises:
            JobError: no layer can be divided, or not as the job says, or the tokens cannot.
        """
        if self._size == 1:
            return TensorParallelPlan()
        # Imported here: only tensor parallelism needs the tracer, which takes time to import.
        from trainwright.strategies.torch.tensor_parallel.plan_search import (
            TensorParallelPlanner,
            sequence_parallel_problem,
        )
        from trainwright.strategies.torch.tracing.op_trace import meta_runner, trace_model

        found, call = columns(), (spec.inputs, spec.keywords)
        given = found if spec.step else {name: found[name] for name in spec.inputs}
        run = meta_runner(given, call, spec.step, rows)
        planner = TensorParallelPlanner(model, run, self._size, self._where)
        if spec.tensor_plan:
            plan = planner.planned(spec.tensor_plan)
        else:
            plan = planner.found(lambda meta_model: trace_model(meta_model, given, call, spec.step))
        if sequence and (why := sequence_parallel_problem(model, plan, run, self._size, self._where)):
            raise JobError(
                [f"sequence=1: the tokens cannot be divided between tensor-parallel layers: {why}; leave it out"],
                where=self._where,
            )
        return replace(plan, sequence=sequence)

    def shard(self, model: nn.Module, plan: TensorParallelPlan) -> dict[str, ShardSlice]:
        """Keep this rank's part of each layer that the plan divides.

        Returns:
            What is kept of each divided parameter, by all of its names.

        Raises:
            JobError: a parameter has hooks.
        """
        if self._size == 1:
            return {}
        self._group = TensorParallelGroup(
            index=self._index, size=self._size, process_group=self._process_group, sequence=plan.sequence
        )
        return shard_layers(model, plan, self._group, self._where)

    def set_process_group(self, process_group: ProcessGroup | None) -> None:
        """Let the divided layers communicate in another group; None where there is none at the moment."""
        if self._group is not None:
            self._group.process_group = process_group
