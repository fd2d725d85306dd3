"""Notices of a cloud that this machine will be taken back, from the metadata service of AWS, Google Cloud or Azure.

A machine asks only where its firmware (DMI) names one of these clouds, or where the environment names the address of a
metadata service, as the clouds' own libraries read it. Elsewhere nothing is sent.

Formats and times: "Spot Instance interruption notices" and "EC2 instance rebalance recommendations" (Amazon EC2 User
Guide), "Preemptible VM instances" and "Query the metadata server for maintenance event notices" (Compute Engine),
"Scheduled Events for Linux VMs" (Azure).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

POLL_S = 2.0
PATIENCE_S = 150.0  # without a valid answer, before this is reported; Azure's first one may take two minutes
_ANSWER_S = 2.0
_MAX_BYTES = 1 << 20
_DMI = Path("/sys/class/dmi/id")
_ADDRESS = "http://169.254.169.254"  # the same in all three clouds

_AWS_LEAD_S = 120.0
_AWS_TOKEN_S = "21600"  # the longest life of a token
_GOOGLE_LEAD_S = 30.0
_GOOGLE_MAINTENANCE_LEAD_S = 60.0  # an hour where the machine has GPUs
_AZURE_SOON_S = 900.0  # an earlier handover would leave the machine idle, for days where hardware may fail
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"  # the chassis of all machines of Azure; other Hyper-V hosts have none
_AZURE_ENDS = {
    "Preempt": "Azure spot eviction",
    "Terminate": "Azure deletes the machine",
    "Reboot": "Azure reboots the machine",
    "Redeploy": "Azure moves the machine to another host",
}


@dataclass(frozen=True, kw_only=True)
class NodeNotice:
    """A cloud's notice for a node."""

    key: str  # each is reported once for a node
    text: str  # such as "AWS spot interruption (terminate)"
    left_s: float | None = None  # until the node ends, infinite if that is not known; None: its processes live on
    avoid: bool = False  # whether new processes should go elsewhere


class MetadataService(Protocol):
    """The metadata service of a cloud."""

    name: str
    hint: str

    async def notices(self) -> list[NodeNotice]:
        """Return the current notices. Raises any error of the network or of an invalid answer."""


def await_cloud_notice(
    known_keys: Collection[str],
    stopped: Callable[[float], bool],
    *,
    service: MetadataService | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> NodeNotice | None:
    """Wait for a notice for this machine.

    Args:
        known_keys: keys of earlier notices.
        stopped: waits for the given seconds; returns whether nobody needs the answer any more.
        service: metadata service; by default that of this machine's cloud.
        clock: monotonic clock, in seconds.

    Returns:
        The first new notice, which may be that the service does not answer; None without a cloud.
    """
    service = service or metadata_service()
    answered_s = clock()
    while service is not None:
        try:
            notices = asyncio.run(service.notices())
            answered_s = clock()
        except Exception as error:  # training continues whatever the service answers; the error is reported below
            notices = [_trouble(service, error)] if clock() - answered_s >= PATIENCE_S else []
        for notice in notices:
            if notice.key not in known_keys:
                return notice
        if stopped(POLL_S):
            break
    return None


def _trouble(service: MetadataService, error: Exception) -> NodeNotice:
    why = str(error) or f"no answer within {_ANSWER_S:g} s"
    text = f"the metadata service of {service.name} gave no valid answer for {PATIENCE_S:g} s"
    return NodeNotice(key="trouble", text=f"{text}, so preemption notices are not received: {why}; {service.hint}")


def metadata_service(
    environment: Mapping[str, str] = os.environ, folder: Path = _DMI, clock: Callable[[], float] = time.time
) -> MetadataService | None:
    """Return the metadata service of this machine's cloud; None where there is none, or the user does not want it.

    Args:
        environment: of this process.
        folder: facts of the firmware, a file each.
        clock: seconds since 1970.
    """

    def fact(name: str) -> str:
        try:
            return (folder / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # containers may hide it
            return ""

    aws, google = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", ""), environment.get("GCE_METADATA_HOST", "")
    # Older EC2 machines run on Xen and name Amazon only in bios_version.
    on_aws = fact("sys_vendor") == "Amazon EC2" or fact("bios_version").endswith(".amazon")
    if (aws or on_aws) and environment.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
        return _Aws(_Http(aws or _ADDRESS), clock)
    if google or fact("product_name") == "Google Compute Engine":
        return _GoogleCloud(_Http(f"http://{google}" if google else _ADDRESS))
    return _Azure(_Http(_ADDRESS), clock) if fact("chassis_asset_tag") == _AZURE_TAG else None


class _Http:
    """Requests to one address: no proxy, no redirect, an end after `_ANSWER_S` in all."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")

    async def answer(
        self, path: str, headers: Mapping[str, str], *, method: str = "GET", demands: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Return the status and the text of an answer. Raises ValueError for one without the headers in `demands`."""
        import aiohttp  # a tenth of a second, which machines of no cloud do not need

        limit = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.request(method, self._address + path, headers=headers, allow_redirects=False) as response,
        ):
            for name, value in (demands or {}).items():
                if response.headers.get(name) != value:
                    raise ValueError(f"{self._address}{path} answered without the header {name}: {value}")
            text = bytearray()
            async for part in response.content.iter_any():
                text += part
                if len(text) > _MAX_BYTES:
                    raise ValueError(f"{self._address}{path} answered more than {_MAX_BYTES:,} bytes")
            return response.status, text.decode(errors="replace")

    async def text(self, path: str, headers: Mapping[str, str], **options: Any) -> str:
        """Return the text of an answer. Raises ValueError for any status but 200."""
        return self.checked(path, *await self.answer(path, headers, **options))

    def checked(self, path: str, status: int, text: str) -> str:
        """Return the text. Raises ValueError for any status but 200."""
        if status != 200:
            raise ValueError(f"{self._address}{path} answered status {status}")
        return text


class _Aws:
    """EC2, with the session tokens of version 2."""

    name = "AWS"
    hint = "in containers, raise the instance's HttpPutResponseHopLimit to 2, or set AWS_EC2_METADATA_DISABLED=true"

    def __init__(self, http: _Http, clock: Callable[[], float]) -> None:
        self._http, self._clock, self._token = http, clock, ""

    async def notices(self) -> list[NodeNotice]:
        """Return the interruption of a spot instance, or the recommendation that comes before it."""
        action = await self._document("/latest/meta-data/spot/instance-action")
        if action is not None:
            left_s = datetime.fromisoformat(action["time"]).timestamp() - self._clock()
            left_s = min(max(0.0, left_s), _AWS_LEAD_S)  # clocks may differ
            return [NodeNotice(key="interruption", text=f"AWS spot interruption ({action['action']})", left_s=left_s)]
        advice = await self._document("/latest/meta-data/events/recommendations/rebalance")
        if advice is not None:
            text = f"AWS recommends to leave this spot instance (rebalance recommendation of {advice['noticeTime']})"
            return [NodeNotice(key="rebalance", text=text, avoid=True)]
        return []

    async def _document(self, path: str) -> Any:
        """Return a JSON document; None if it is not there."""
        status, text = 401, ""
        for _ in range(2):
            if not self._token:
                header = {"X-aws-ec2-metadata-token-ttl-seconds": _AWS_TOKEN_S}
                self._token = await self._http.text("/latest/api/token", header, method="PUT")
            status, text = await self._http.answer(path, {"X-aws-ec2-metadata-token": self._token})
            if status != 401:
                break
            self._token = ""  # it has expired
        return None if status == 404 else json.loads(self._http.checked(path, status, text))


class _GoogleCloud:
    """Compute Engine."""

    name = "Google Cloud"
    hint = "let the machine's processes reach metadata.google.internal, or set TRAINWRIGHT_CLOUD_NOTICES=off"

    def __init__(self, http: _Http) -> None:
        self._http = http

    async def notices(self) -> list[NodeNotice]:
        """Return the preemption of a spot machine, or maintenance of the host."""
        if await self._value("preempted", ("TRUE", "FALSE")) == "TRUE":
            return [NodeNotice(key="preempted", text="Google Cloud preemption", left_s=_GOOGLE_LEAD_S)]
        ends, moves = "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"
        maintenance = await self._value("maintenance-event", ("NONE", ends, moves))
        if maintenance == ends:
            text = "Google Cloud stops the machine for host maintenance"
            return [NodeNotice(key=ends, text=text, left_s=_GOOGLE_MAINTENANCE_LEAD_S)]
        if maintenance == moves:
            text = "Google Cloud moves the running machine to another host; steps may be slow for a while"
            return [NodeNotice(key=moves, text=text)]
        return []

    async def _value(self, name: str, values: tuple[str, ...]) -> str:
        """Return a value of the instance. Raises ValueError if it is none of `values`."""
        path, flavor = f"/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"}
        value = (await self._http.text(path, flavor, demands=flavor)).strip()
        if value not in values:
            raise ValueError(f"{path} answered {value[:80]!r} instead of {' or '.join(values)}")
        return value


class _Azure:
    """Virtual machines of Azure. Their events are only read, never acknowledged, which would bring them forward."""

    name = "Azure"
    hint = "let the machine's processes reach 169.254.169.254, or set TRAINWRIGHT_CLOUD_NOTICES=off"
    _HEADER: Mapping[str, str] = {"Metadata": "true"}

    def __init__(self, http: _Http, clock: Callable[[], float]) -> None:
        self._http, self._clock, self._machine = http, clock, ""

    async def notices(self) -> list[NodeNotice]:
        """Return scheduled events of this machine; the service also lists those of its scale set's other machines."""
        if not self._machine:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = (await self._http.text(path, self._HEADER)).strip()
        text = await self._http.text("/metadata/scheduledevents?api-version=2020-07-01", self._HEADER)
        events = [event for event in json.loads(text)["Events"] if self._machine in event["Resources"]]
        return [notice for event in events if (notice := self._notice(event)) is not None]

    def _notice(self, event: Mapping[str, Any]) -> NodeNotice | None:
        kind, key = event["EventType"], event["EventId"]
        if kind not in _AZURE_ENDS:
            paused = "pauses the machine for some seconds" if kind == "Freeze" else f"announces {kind!r}"
            return NodeNotice(key=key, text=f"Azure {paused} (scheduled event)")
        not_before = event["NotBefore"]  # empty once it has begun
        left_s = max(0.0, parsedate_to_datetime(not_before).timestamp() - self._clock()) if not_before else 0.0
        return NodeNotice(key=key, text=_AZURE_ENDS[kind], left_s=left_s) if left_s <= _AZURE_SOON_S else None
