"""Process groups: reserve a port, join, interrupt, leave. A process is in one group at a time, as torch has it.

Abort and shutdown of `ProcessGroupGloo` do nothing, and a blocked collective keeps the group and its sockets open, for
which other ranks wait. So the sockets are found and shut here: gloo serves all of them by an epoll instance of its own
(gloo/transport/tcp/loop.cc), and Linux lists the descriptors of an instance in /proc/self/fdinfo.

Connections are shut for reading only. gloo then ends them by itself and wakes all who wait. A failed write is reported
to nobody (gloo/transport/tcp/pair.cc: `signalException` skips the unbound buffers in `tx_`), and its collective would
wait until the group's deadline, so no write must fail before gloo has seen the end. At the peers a write may fail, as
where a process dies; a group that still waits then is abandoned. Stages of a pipeline send tensors over sockets of
their own (`pipeline.stage_channels`).

NCCL's communicators are aborted instead. The kernel of an aborted collective ends with any values and raises nothing,
so `confirm` comes before a result of collectives is used. Torch's own watchdog is told to end no process.
"""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp, TCPStore  # type: ignore[attr-defined]

from trainwright.core.errors import DeviceError, PeerLost, TrainwrightError
from trainwright.core.topology import Address, Group
from trainwright.strategies.common.socket_transport import LOOPBACK, bind_with_loopback, network_interfaces, own_host
from trainwright.strategies.torch.torch_compat import (
    nonblocking_nccl,
    process_groups,
    reduce_scatter_single,
    reset_group_count,
)
from trainwright.strategies.torch.torch_errors import clear_frames, sticky_error

_BACKENDS = {"cuda": "nccl"}  # by type of device; gloo for all others
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# Torch's watchdog neither ends the process after an error or an abort, nor after an error of the device (which the step
# raises too, and tells a failed assertion from a failed device), nor where an abort takes long.
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_DESTROY_WAIT_S = 1.0  # a group of which nothing is under way has ended in hundredths
_ABORT_WAIT_S = 10.0  # an abort of NCCL took one second on an H100


class ProcessGroupHandle:
    """This process's membership in a process group.

    Rank 0's reserved socket becomes the listening socket of the group's TCPStore, so that its port cannot be lost
    in between; the other ranks' are closed. The ports of gloo and NCCL come from the system. The store lets in whoever
    reaches it: it listens on loopback where all ranks are on one host, else on this node's address alone.

    An interrupt counts from `reserve` on, whatever `join` does or is yet to do.
    """

    def __init__(self) -> None:
        self._sockets: tuple[socket.socket, ...] = ()  # at this node's address, and at loopback
        self._store: TCPStore | None = None
        self._lock = threading.Lock()  # guards what `interrupt` reads
        self._port: int | None = None  # of the store, while this process is in a group or joins one
        self._backend = "gloo"  # of this group
        self._interrupted: Future[None] = Future()
        self._interface = ExitStack()  # of the sockets of this group and of those that are made of its ranks

    def reserve(self) -> Address:
        """Bind a port that the system chooses, and listen; the host is this node's address."""
        self._close_sockets()
        self._interrupted = Future()
        self._sockets = bind_with_loopback(own_host())
        for each in self._sockets:
            each.listen(1024)
        return Address(host=own_host(), port=self._sockets[0].getsockname()[1])

    def join(self, group: Group, device: torch.device) -> None:
        """Form the process group; every member calls it.

        Raises PeerLost where it does not form by the deadline, or before it is interrupted. Raises DeviceError, or
        UserCodeError, where an error of this rank's device was the reason for the last interruption.
        """
        self._end()
        failure: TrainwrightError | None = None
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._interface.enter_context(socket_interface(group))
            self._join(group, device)
        except (RuntimeError, OSError) as error:
            until = "before it was interrupted" if self._interrupted.done() else f"within {group.deadline_s:g} s"
            failure = sticky_error(error, f"rank {group.rank}") or PeerLost(
                f"the group of {group.size} did not form {until}: {str(error).splitlines()[0]}",
                where=f"rank {group.rank}",
                remedy="look at the rank that failed first",
            )
            clear_frames(error)
        if failure is not None:
            self.leave()
            raise failure

    def leave(self) -> None:
        """Leave the group and close its sockets, so that waiting peers notice at once. May be called at any time.

        Nothing may hold the DDP object any more.
        """
        self._close_sockets()
        self._end()

    def interrupt(self) -> bool:
        """End blocked collectives, from any thread: they raise over gloo, here and at the peers; see `confirm`.

        So does who waits for the group's store. False where there was nothing to end, or what blocks is not to be
        found (not Linux), or NCCL does not abort in time.
        """
        with self._lock:
            if not self._interrupted.done():
                self._interrupted.set_result(None)
        return self._shut()

    def confirm(self, device: torch.device) -> None:
        """Wait for what the device does; raise PeerLost where the group was aborted meanwhile.

        Nothing to do over gloo, whose collectives raise.
        """
        if self._backend == "gloo":
            return
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        if self.aborted:
            raise PeerLost("the group was aborted", remedy="look at the rank that failed first")

    @property
    def aborted(self) -> bool:
        """Whether collectives of this group may have ended with any values."""
        return self._backend != "gloo" and self._interrupted.done()

    def _shut(self) -> bool:
        with self._lock:
            if self._port is None:
                return False
            shut = shut_connections(epoll_instances() - _foreign_epolls()) if self._backend == "gloo" else 0
            shut += shut_port_connections(self._port)
            if self._backend == "gloo":
                return shut > 0
        return _abort_groups()

    def _end(self) -> None:
        """End a group whose collectives may still be under way, which would keep the sockets open.

        The last holder of a group over gloo waits for them, and gloo may forget one for the whole deadline, as `gloo`
        says. Its connections are shut then, so that nobody else does: this rank is not to wait for it either. Groups of
        NCCL are aborted first: torch waits for the peers of others, and raises the error of a broken one again.

        Raises DeviceError where a group of NCCL does not end: this process cannot join another one.
        """
        self._interface.close()
        self._shut()
        with self._lock:
            self._port = None
        if self._store is None:
            return
        gc.collect()
        if distributed.is_initialized() and self._backend == "gloo":
            groups = [*process_groups()]
            distributed.destroy_process_group()
            _run_for(_DESTROY_WAIT_S, groups.clear)
        elif distributed.is_initialized() and not _run_for(_ABORT_WAIT_S, distributed.destroy_process_group):
            raise DeviceError(
                f"the process group of {self._backend} did not end within {_ABORT_WAIT_S:g} s, or the log has an error",
                remedy="the rank continues in another process; if it fails again there, look at the node's network and "
                "its kernel log (dmesg)",
            )
        self._store = None

    def _join(self, group: Group, device: torch.device) -> None:
        deadline = timedelta(seconds=group.deadline_s)
        _end_foreign_group()
        with self._lock:
            _foreign_epolls()
            self._port = group.peers[0].address.port
            self._backend = _BACKENDS.get(device.type, "gloo")
        store = self._store = self._meet(group, deadline)
        if store.add("arrived", 1) == group.size:
            store.set("complete", "")
        store.wait(["complete"], deadline)  # where `interrupt` has connections to shut
        # The group's keys in the store carry this count, which torch sets back only with a group that had formed: after
        # one that had not, this process and a new one would wait for each other under different names.
        reset_group_count()
        if self._backend == "nccl":
            _set_nccl_defaults(group.deadline_s)
        with self._connecting():
            distributed.init_process_group(
                backend=self._backend,
                store=store,
                rank=group.rank,
                world_size=group.size,
                timeout=deadline,
                device_id=device if device.type == "cuda" else None,
            )

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        """Let a thread make gloo's connections; it is abandoned where the group is interrupted.

        gloo waits until the deadline for a rank that published its address and died before it connected
        (gloo/transport/tcp/pair.cc, `waitUntilConnected`), with nothing to shut. Torch knows of nothing that was made
        until the constructor returns.
        """
        torchs: Any = distributed.distributed_c10d
        make = torchs.ProcessGroupGloo

        def connect(*arguments: Any, **options: Any) -> Any:
            torchs.ProcessGroupGloo = make  # torch looks at what was made
            return self._reached(lambda: make(*arguments, **options), "the ranks had not connected to each other")

        torchs.ProcessGroupGloo = connect
        try:
            yield
        finally:
            torchs.ProcessGroupGloo = make

    def _reached(self, make: Callable[[], _Result], otherwise: str) -> _Result:
        """Return the result of a thread that waits for other ranks. Raises ConnectionAbortedError once interrupted."""
        if self._interrupted.done():
            raise ConnectionAbortedError(otherwise)
        made: Future[_Result] = Future()

        def run() -> None:
            try:
                made.set_result(make())
            except Exception as error:
                made.set_exception(error)

        threading.Thread(target=run, name="connecting", daemon=True).start()
        either: tuple[Future[Any], ...] = (made, self._interrupted)
        wait(either, return_when=FIRST_COMPLETED)
        if self._interrupted.done():  # maybe before there was a connection to shut
            raise ConnectionAbortedError(otherwise)
        return made.result()

    def _meet(self, group: Group, deadline: timedelta) -> TCPStore:
        """Connect to the store at rank 0's reserved port, or open it there.

        torch retries until the deadline where rank 0 has died, or dies before it opens the store, and nothing stops it.
        So a thread does that, which is left behind where the group is interrupted.
        """
        leader = group.peers[0].address
        one_host = is_one_host(group)
        host = LOOPBACK if one_host else leader.host
        listening = self._sockets[-1 if one_host else 0] if self._sockets and group.rank == 0 else None
        self._sockets = tuple(each for each in self._sockets if each is not listening)
        self._close_sockets()
        try:
            return self._reached(
                lambda: TCPStore(
                    host,
                    leader.port,
                    world_size=group.size,
                    is_master=group.rank == 0,
                    timeout=deadline,
                    wait_for_workers=False,
                    master_listen_fd=None if listening is None else listening.detach(),
                ),
                "rank 0 had not opened the group's store",
            )
        finally:
            if listening is not None:
                listening.close()  # where the store has not taken it over

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close()
        self._sockets = ()


def _set_nccl_defaults(deadline_s: float) -> None:
    """Set what torch reads from the environment for groups of NCCL, unless the user chose otherwise.

    An abort does not reach a rank that waits for its peers to connect: in a call of NCCL, or in torch, with the
    communicator's lock (NCCLUtils.cpp, `getNcclComm`), where communicators are made without blocking. Then torch raises
    after so many seconds, which it reads once in a process. Up to torch 2.9 such communicators hang at random.
    """
    settings = {**_NCCL_SETTINGS, "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(deadline_s))}
    if nonblocking_nccl:
        settings["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _abort_groups() -> bool:
    """Abort all groups of this process, beside each other; False where an abort takes too long or raises.

    Blocked collectives end with any values. An abort of NCCL may wait for another communicator, which another rank
    aborts first (pytorch#119797). Several groups at a time are not verified on hardware.
    """
    return _run_for(_ABORT_WAIT_S, *[group.abort for group in [*process_groups()]])


def _run_for(seconds: float, *works: Callable[[], object]) -> bool:
    """Call functions, each in a thread, which are left behind after so many seconds; False then, or if one raised."""
    done = list[None]()

    def run(work: Callable[[], object]) -> None:
        try:
            work()
            done.append(None)
        except Exception:
            _log.exception("a process group could not be ended")

    threads = [threading.Thread(target=run, args=(work,), name="ending", daemon=True) for work in works]
    until_s = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until_s - time.monotonic(), 0.0))
    return len(done) == len(works)


def _end_foreign_group() -> None:
    """End the default group of another library, such as that of a TorchTrainer: torch has one in a process."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()  # its connections are closed before ours are told apart from others


@cache
def _foreign_epolls() -> frozenset[int]:
    """Return the epoll instances from before this process's first group; later ones belong to its groups.

    One that is asked for again at each group would hold what is left of the one before, whose number the next may get.
    """
    return epoll_instances()


def all_gather_ints(own: list[int], device: torch.device) -> list[list[int]]:
    """Gather integers of every rank, in the order of the ranks. All ranks call it."""
    numbers = torch.tensor(own, device=device)
    gathered = [torch.empty_like(numbers) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, numbers)
    answers: list[list[int]] = torch.stack(gathered).tolist()
    return answers


def all_gather_json(own: Any, device: torch.device) -> list[Any]:
    """Gather a value that JSON has of every rank, in the order of the ranks. All ranks call it."""
    data = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = [size for (size,) in all_gather_ints([len(data)], device)]
    filled = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    filled[: len(data)] = data.to(device)
    gathered = [torch.empty_like(filled) for _ in sizes]
    distributed.all_gather(gathered, filled)
    return [json.loads(each[:size].cpu().numpy().tobytes()) for each, size in zip(gathered, sizes, strict=True)]


def is_gloo(group: ProcessGroup | None = None) -> bool:
    """Return whether a group communicates through gloo, as on CPUs; None for the default group."""
    return str(distributed.get_backend(group)) == "gloo"


def reduce_scatter(own: Tensor, whole: Tensor, group: ProcessGroup | None, *, mean: bool = False) -> None:
    """Write this rank's part of the sum over a group's ranks, or of their mean.

    gloo's own reduce-scatter is an all-reduce of a copy. An exchange of parts takes a third of its time (measured with
    2 ranks and 2 MB).

    Args:
        own: for the part; contiguous.
        whole: the parts of all ranks in their order, each as large as `own`; contiguous.
    """
    if not is_gloo(group):
        kind = ReduceOp.AVG if mean else ReduceOp.SUM
        reduce_scatter_single(own, whole, kind, group=group)
        return
    parts = torch.empty_like(whole)
    distributed.all_to_all_single(parts, whole, group=group)
    combine = torch.mean if mean else torch.sum
    combine(parts.view(distributed.get_world_size(group), *own.shape), 0, out=own)


def is_one_host(group: Group) -> bool:
    """Return whether all members are on one host."""
    return len({peer.address.host for peer in group.peers}) == 1


@contextmanager
def socket_interface(group: Group) -> Iterator[None]:
    """Make gloo and NCCL use the address at which the peers expect this rank, unless the user chose otherwise.

    By default gloo takes what the host's name resolves to, which may be loopback (Debian's 127.0.1.1), and NCCL the
    first interface that is neither loopback nor Docker's. NCCL looks once in a process, at a `=` for the exact name.
    """
    host = group.peers[group.rank].address.host
    wanted = {
        _GLOO_INTERFACE: interface_name(LOOPBACK if is_one_host(group) else host),
        _NCCL_INTERFACE: f"={name}" if (name := interface_name(host)) else None,
    }
    ours = {variable: name for variable, name in wanted.items() if name and variable not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for variable in ours:
            os.environ.pop(variable, None)


def interface_name(host: str) -> str | None:
    """Return the name of the network interface with IPv4 address `host`; None where it is not known."""
    if sys.platform != "linux":
        return None
    wanted = socket.gethostbyname(host)
    return next((name for name, address, _ in network_interfaces() if address == wanted), None)


# --- gloo's sockets ---------------------------------------------------------------------------------------------------


_FDS = "/proc/self/fd"
_WATCHED_DESCRIPTORS = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)


def epoll_instances() -> frozenset[int]:
    """Return descriptors of epoll instances without close-on-exec, which are gloo's. Empty off Linux."""
    return frozenset(fd for fd in _descriptors() if _is_epoll(fd))


def shut_connections(of: Iterable[int]) -> int:
    """Shut the connections that these epoll instances watch for reading; from any thread. Returns how many."""
    return sum(_shut_descriptor(fd, inode) for loop in of for fd, inode in _watched_descriptors(loop))


def shut_port_connections(port: int) -> int:
    """Shut this process's TCP connections with that port at either end; from any thread. Returns how many."""
    return sum(_shut_descriptor(fd, port=port) for fd in _descriptors())


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_FDS)]
    except FileNotFoundError:
        return []


def _is_epoll(fd: int) -> bool:
    try:
        kept = not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        return kept and os.readlink(f"{_FDS}/{fd}") == "anon_inode:[eventpoll]"
    except OSError:
        return False  # closed meanwhile


def _watched_descriptors(loop: int) -> Iterator[tuple[int, int]]:
    """Return the descriptors that an epoll instance watches, with their inodes."""
    try:
        with open(f"/proc/self/fdinfo/{loop}") as info:
            text = info.read()
    except OSError:
        return
    for fd, inode in _WATCHED_DESCRIPTORS.findall(text):
        yield int(fd), int(inode, 16)


def _shut_descriptor(fd: int, inode: int | None = None, *, port: int | None = None) -> bool:
    """Shut one connection, looked at through a descriptor of our own, since another thread may close `fd` any time."""
    try:
        own = os.dup(fd)
    except OSError:
        return False
    try:
        held = socket.socket(fileno=own)
    except OSError:  # not a socket
        os.close(own)
        return False
    with held:
        if held.type != socket.SOCK_STREAM or held.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if inode is not None and os.fstat(own).st_ino != inode:
            return False
        try:
            ends = (held.getsockname()[1], held.getpeername()[1])
            if port is not None and port not in ends:
                return False
            held.shutdown(socket.SHUT_RD if port is None else socket.SHUT_RDWR)
        except OSError:  # it listens, or its peer is gone
            return False
        return True
