"""A stand-in for NCCL on CPUs: a collective blocks until an abort, and then ends with any values and no error.

gloo raises where a peer has died. This backend carries collectives out by gloo in a thread and hides what they raise,
as kernels on a GPU do: whoever waits is freed by `abort` alone, and finds ones in its tensors.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Work
from torch.futures import Future

from trainwright.strategies.torch.distributed import process_group

NAME = "aborting"


class _Collective(Work):
    """A collective under way; its outputs are taken by the thread that waits."""

    def __init__(self, outputs: Sequence[Tensor], copies: Sequence[Tensor], aborted: threading.Event) -> None:
        super().__init__()
        self._outputs, self._copies, self._aborted = [*outputs], [*copies], aborted
        self.done = threading.Event()
        self._taken = False

    def wait(self, timeout: Any = None) -> bool:
        while not (self.done.wait(0.002) or self._aborted.is_set()):
            pass
        if not self._taken:
            self._taken = True
            with torch.no_grad():
                for output, copy in zip(self._outputs, self._copies, strict=True):
                    if self.done.is_set():
                        output.copy_(copy)
                    else:
                        output.fill_(1)  # nothing tells that it is wrong
        return True

    def get_future(self) -> Any:
        made: Any = Future()
        self.wait()
        made.set_result(self._outputs)
        return made

    def is_completed(self) -> bool:
        return self.done.is_set() or self._aborted.is_set()


_Calls = queue.Queue[tuple[_Collective, Callable[[Any], Any]] | None]


class AbortingGroup(distributed.ProcessGroup):
    """The process group. It connects in its first collective, as NCCL does."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._arguments = store, rank, size, timeout
        self._aborted = threading.Event()
        self._streams: dict[str, _Calls] = {}
        self._connecting = threading.Lock()

    @cached_property
    def _gloo(self) -> distributed.ProcessGroupGloo:
        return distributed.ProcessGroupGloo(*self._arguments)

    def _serve(self, calls: _Calls) -> None:
        """Carry out what was called, in this order, until the abort."""
        while called := calls.get():
            work, call = called
            try:
                with self._connecting:
                    gloo = self._gloo
                call(gloo).wait()
            except RuntimeError:
                return  # a kernel raises nothing: it waits, and so do those behind it
            work.done.set()

    def _start(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        call: Callable[[Any, Any, Any], Any],
        stream: str = "",
    ) -> _Collective:
        copies = [output.detach().clone() for output in outputs]
        given = [each.detach().clone() for each in inputs]
        work = _Collective(outputs, copies, self._aborted)
        if stream not in self._streams:
            self._streams[stream] = queue.Queue()
            threading.Thread(target=self._serve, args=(self._streams[stream],), daemon=True).start()
        self._streams[stream].put((work, lambda gloo: call(gloo, copies, given)))
        return work

    def abort(self) -> None:
        self._aborted.set()
        for calls in self._streams.values():
            calls.put(None)

    shutdown = abort

    supports_coalescing = False

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend(self, device: Any) -> Any:
        return self

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        options = distributed.AllreduceOptions() if opts is None else opts
        return self._start(tensors, (), lambda gloo, copies, _: gloo.allreduce(copies, options))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        return self._start(tensors, (), lambda gloo, copies, _: gloo.broadcast(copies, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._start(outputs[0], inputs, lambda gloo, copies, given: gloo.allgather([copies], given))

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        return self._start([output], [given], lambda gloo, copies, held: gloo._allgather_base(copies[0], held[0]))

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> Work:
        def call(gloo: Any, copies: Any, held: Any) -> Any:
            return gloo._reduce_scatter_base(copies[0], held[0], opts)

        return self._start([output], [given], call)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return self._start((), tensors, lambda gloo, _, given: gloo.send(given, to, tag), f"to {to}, {tag}")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return self._start(tensors, (), lambda gloo, copies, _: gloo.recv(copies, source, tag), f"from {source}, {tag}")

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # since torch 2.13

    def barrier(self, opts: Any = None) -> Work:
        return self._start((), (), lambda gloo, copies, _: gloo.barrier())


def install() -> None:
    """Let engines of this process use it on CPUs from now on."""
    if NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(NAME, AbortingGroup, devices=["cpu"])
    process_group._BACKENDS["cpu"] = NAME
