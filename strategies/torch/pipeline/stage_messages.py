"""What a stage receives for its operations and sends to the stages beside it, or to its own next section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainwright.core.plan import section_of, stage_of_section
from trainwright.strategies.cost_model.pipeline_schedules import Operation
from trainwright.strategies.torch.pipeline.p2p import Direction, StageLinks
from trainwright.strategies.torch.pipeline.split import SplitModel
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import full_tensor
from trainwright.strategies.torch.training.objective import MicroBatchShare
from trainwright.strategies.torch.training.train_state import PhaseTimer


@dataclass(kw_only=True)
class StageMessages:
    """The activations and gradients that enter and leave a stage.

    Attributes:
        cut: the model, which knows the shapes of what passes between sections.
        links: to the other stages.
        schedule: says which stage holds a section.
        laps: takes the time of waiting.
        dtypes: of the values that enter a section, where autocast makes them others than in a run without data.
    """

    cut: SplitModel
    links: StageLinks
    schedule: str
    laps: PhaseTimer
    dtypes: dict[int, list[torch.dtype]] = field(default_factory=dict)
    _local_values: dict[Operation, list[Tensor]] = field(default_factory=dict)  # from section to section on this stage

    def section(self, operation: Operation) -> int:
        """Return the section that an operation of this stage runs."""
        return section_of(self.schedule, stage=self.links.stage, stages=len(self.links.column), chunk=operation.chunk)

    def stage_of(self, section: int) -> int:
        """Return the stage that holds a section."""
        return stage_of_section(self.schedule, section=section, stages=len(self.links.column))[0]

    def expect(self, operation: Operation, shares: Sequence[tuple[int, MicroBatchShare]]) -> None:
        """Start to receive what an operation needs from another stage, once."""
        if operation.kind == "weights" or operation in self.links.receives:
            return
        forward = operation.kind == "forward"
        rows = shares[operation.micro_batch][1].batch.rows
        source = self.section(operation) + (-1 if forward else 1)
        if not 0 <= source < self.cut.sections or self.stage_of(source) == self.links.stage:
            return
        if forward:
            metas = self.input_metas(operation, rows)
        else:
            metas = [meta for meta in self.output_metas(operation, rows) if meta.requires_grad]
        buffers = [torch.empty(meta.shape, dtype=meta.dtype, device=self.links.device) for meta in metas]
        way: Direction = "forward" if forward else "backward"
        self.links.receives[operation] = self.links.receive(buffers, self.stage_of(source), way)

    def received(self, operation: Operation) -> list[Tensor]:
        """Return what an operation needs, once it is there."""
        if operation not in self.links.receives:
            return self._local_values.pop(operation, [])  # nothing is given to the first section
        buffers = self.links.take(self.links.receives[operation])
        del self.links.receives[operation]  # only now: an error may leave it under way
        self.laps.wait()
        return buffers

    def input_metas(self, operation: Operation, rows: int) -> list[Tensor]:
        """Return what enters an operation's section, without data."""
        section = self.section(operation)
        return self._metas(section, rows) if section else []

    def output_metas(self, operation: Operation, rows: int) -> list[Tensor]:
        """Return what an operation's section gives to the next one, without data."""
        return self._metas(self.section(operation) + 1, rows)

    def send(self, tensors: Sequence[Tensor], operation: Operation, *, ahead: bool = False) -> None:
        """Give the results of an operation to the section that needs them.

        Gradients of the first section's inputs are dropped. What is sent ahead of its step is copied: it may be a view
        of parameters, which change while it is under way.
        """
        way: Direction = "forward" if operation.kind == "forward" else "backward"
        target = self.section(operation) + (1 if way == "forward" else -1)
        if target < 0:
            return
        stage, chunk = stage_of_section(self.schedule, section=target, stages=len(self.links.column))
        sent = [full_tensor(each.detach()).resolve_conj().resolve_neg().contiguous() for each in tensors]
        if stage == self.links.stage:
            self._local_values[Operation(operation.kind, operation.micro_batch, chunk)] = sent
        else:
            self.links.send([each.clone() for each in sent] if ahead else sent, stage, way, ahead=ahead)

    def settle(self) -> None:
        """Wait until all has been sent."""
        self.links.settle()
        self.laps.wait()

    def receive_dtypes(self, operation: Operation, rows: int) -> None:
        """Learn in which types the values that enter a section come, from the stage before."""
        section = self.section(operation)
        if section and (before := self.stage_of(section - 1)) != self.links.stage:
            self.dtypes[section] = self.links.receive_dtypes(len(self.cut.taken(section, rows)), before)

    def send_dtypes(self, operation: Operation, outputs: Sequence[Tensor]) -> None:
        """Say in which types the values come that a section gives to the next one."""
        section = self.section(operation) + 1
        self.dtypes[section] = [each.dtype for each in outputs]
        if (after := self.stage_of(section)) != self.links.stage:
            self.links.send_dtypes(self.dtypes[section], after)

    def take_early(self) -> None:
        """Take what other stages have sent for the next step, and wait until what this one sent has been taken."""
        for message in self.links.receives.values():
            self.links.take(message)
        self.links.settle()

    def renumber(self, count: int) -> None:
        """Count the micro-batches of the next step from 0, after a step of `count`."""
        coming = [(each._replace(micro_batch=each.micro_batch - count), it) for each, it in self.links.receives.items()]
        self.links.receives.clear()
        self.links.receives.update(coming)

    def clear(self) -> None:
        """Forget what an error may have left."""
        self._local_values.clear()
        self.links.forget()

    def _metas(self, section: int, rows: int) -> list[Tensor]:
        metas, dtypes = self.cut.taken(section, rows), self.dtypes.get(section)
        if dtypes is None:
            return metas
        return [
            torch.empty_like(meta, dtype=dtype, requires_grad=meta.requires_grad)
            for meta, dtype in zip(metas, dtypes, strict=True)
        ]
