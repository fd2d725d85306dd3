"""Notices of AWS, Google Cloud and Azure, read from a service on this machine; no request leaves it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.metadata_server import (
    ACTION,
    AZURE_TAG,
    EVENTS,
    MAINTENANCE,
    NAME,
    PREEMPTED,
    QUIET,
    REBALANCE,
    MetadataServer,
    interruption,
    scheduled,
    serving,
)
from trainwright.worker import cloud_notices
from trainwright.worker.cloud_notices import (
    PATIENCE_S,
    POLL_S,
    MetadataService,
    NodeNotice,
    await_cloud_notice,
    metadata_service,
)

CLOUDS = ("aws", "google", "azure")
FIRMWARE = {
    "aws": {"sys_vendor": "Amazon EC2", "product_name": "p4d.24xlarge"},
    "google": {"sys_vendor": "Google", "product_name": "Google Compute Engine"},
    "azure": {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": AZURE_TAG},
}


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with serving(MetadataServer()) as service:
        yield service


def firmware(folder: Path, **facts: str) -> Path:
    """A folder as `/sys/class/dmi/id`."""
    folder.mkdir(exist_ok=True)
    for name, text in facts.items():
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.fixture
def service(server: MetadataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> MetadataService:
    """That of the cloud which the test is for, at the server; its address is the real one by default."""
    monkeypatch.setattr(cloud_notices, "_ADDRESS", server.address)
    found = metadata_service({}, firmware(tmp_path / "dmi", **FIRMWARE[request.param]))
    assert found is not None
    return found


def notices(service: MetadataService) -> list[NodeNotice]:
    return asyncio.run(service.notices())


# --- What each cloud announces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", CLOUDS, indirect=True)
def test_no_news_is_no_notice(service: MetadataService, server: MetadataServer) -> None:
    assert notices(service) == [] and server.asked


@pytest.mark.parametrize("service", ["aws"], indirect=True)
@pytest.mark.parametrize(("told_s", "left_s"), [(90, 90), (-5, 0), (3600, 120)])
def test_aws_interrupts_a_spot_instance(
    service: MetadataService, server: MetadataServer, told_s: float, left_s: float
) -> None:
    """A clock that is wrong makes no more than the two minutes that AWS gives, and no less than none."""
    server.answers = lambda: interruption(told_s)
    (notice,) = notices(service)
    assert notice.text == "AWS spot interruption (terminate)" and not notice.avoid
    assert notice.left_s is not None and left_s - 5 <= notice.left_s <= left_s


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_aws_recommends_to_leave_which_ends_nothing(service: MetadataService, server: MetadataServer) -> None:
    server.answers = lambda: {REBALANCE: json.dumps({"noticeTime": "2026-10-27T08:22:00Z"})}
    (notice,) = notices(service)
    assert "rebalance recommendation of 2026-10-27T08:22:00Z" in notice.text
    assert notice.left_s is None and notice.avoid


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_a_token_serves_until_it_expires_and_is_then_replaced(service: MetadataService, server: MetadataServer) -> None:
    server.token_requests = 3
    for _ in range(3):  # six requests
        notices(service)
    assert sum(asked.startswith("PUT") for asked in server.asked) == 2
    server.answers = lambda: interruption(90)
    server.token_requests = 0
    with pytest.raises(ValueError, match="status 401"):
        for _ in range(3):
            notices(service)


@pytest.mark.parametrize("service", ["google"], indirect=True)
def test_google_cloud_preempts_and_maintains(service: MetadataService, server: MetadataServer) -> None:
    def after(path: str, value: str) -> tuple[str, float | None, bool]:
        server.answers = lambda: {**QUIET, path: value}
        (notice,) = notices(service)
        return notice.text, notice.left_s, notice.avoid

    assert after(PREEMPTED, "TRUE\n") == ("Google Cloud preemption", 30.0, False)
    text, left_s, _ = after(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    assert "stops the machine" in text and left_s == 60.0
    text, left_s, avoid = after(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
    assert "moves the running machine" in text and left_s is None and not avoid


@pytest.mark.parametrize("service", ["azure"], indirect=True)
@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_ends_a_machine(service: MetadataService, server: MetadataServer, kind: str) -> None:
    server.answers = lambda: {**QUIET, **scheduled(kind, 30)}
    (notice,) = notices(service)
    assert notice.text.startswith("Azure ") and notice.left_s is not None and 25 <= notice.left_s <= 30
    server.answers = lambda: {**QUIET, **scheduled(kind, None)}
    assert notices(service)[0].left_s == 0.0, "it has begun"


@pytest.mark.parametrize("service", ["azure"], indirect=True)
def test_azure_s_events_are_this_machine_s_and_soon(service: MetadataService, server: MetadataServer) -> None:
    server.answers = lambda: {**QUIET, **scheduled("Preempt", 30, machine="workers_30")}
    assert notices(service) == [], "another machine of the scale set"
    server.answers = lambda: {**QUIET, **scheduled("Redeploy", 7 * 86400)}
    assert notices(service) == [], "in a week"
    server.answers = lambda: {**QUIET, **scheduled("Freeze", 600)}
    (notice,) = notices(service)
    assert "pauses the machine" in notice.text and notice.left_s is None and not notice.avoid
    assert sum(NAME in asked for asked in server.asked) == 1 and not any("PUT" in asked for asked in server.asked)


# --- Which machine asks -----------------------------------------------------------------------------------------------


def test_only_a_machine_of_a_cloud_asks(tmp_path: Path) -> None:
    def name(environment: dict[str, str] | None = None, **facts: str) -> str:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        found = metadata_service(environment or {}, firmware(folder, **facts))
        return found.name if found else ""

    assert [name(**FIRMWARE[cloud]) for cloud in CLOUDS] == ["AWS", "Google Cloud", "Azure"]
    assert name(sys_vendor="Xen", bios_version="4.11.amazon") == "AWS"
    assert not name() and not name(sys_vendor="Dell Inc.", product_name="PowerEdge", chassis_asset_tag="")
    assert not name(sys_vendor="Microsoft Corporation", product_name="Virtual Machine"), "Hyper-V on one's own host"
    assert not name(sys_vendor="Google", product_name="Eve"), "a laptop"
    assert not name({"AWS_EC2_METADATA_DISABLED": "True"}, **FIRMWARE["aws"])
    assert name({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}) == "AWS"
    assert name({"GCE_METADATA_HOST": "127.0.0.1:1"}) == "Google Cloud"


def test_a_machine_of_no_cloud_sends_nothing(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_notices, "metadata_service", lambda: None)
    assert await_cloud_notice((), lambda _: False) is None and not server.asked


def test_addresses_of_the_environment_are_asked_without_a_proxy(
    server: MetadataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    host = server.address.removeprefix("http://")
    for environment in ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{server.address}/"}, {"GCE_METADATA_HOST": host}):
        found = metadata_service(environment, tmp_path)
        assert found is not None and notices(found) == []
    assert f"GET {ACTION}" in server.asked and f"GET {PREEMPTED}" in server.asked


# --- A service that fails ---------------------------------------------------------------------------------------------


class Watch:
    """The watch of a service, with a clock that the pauses move."""

    def __init__(self, service: MetadataService) -> None:
        self.service, self.now_s, self.told = service, 0.0, list[str]()

    def next(self, polls: int = 10_000, on_poll: Callable[[int], None] = lambda _: None) -> NodeNotice | None:
        """The next notice; None after so many pauses, each of which calls `on_poll` with its number."""
        numbers = iter(range(1, polls + 1))

        def stopped(after_s: float) -> bool:
            self.now_s += after_s
            number = next(numbers, 0)
            on_poll(number)
            return not number

        found = await_cloud_notice(self.told, stopped, service=self.service, clock=lambda: self.now_s)
        self.told += [found.key] if found else []
        return found


FAULTS = ("500", "403", "404", "redirect", "garbage", "large", "close")
FAILING = [(cloud, fault) for cloud in CLOUDS for fault in FAULTS if (cloud, fault) != ("aws", "404")]


@pytest.mark.parametrize(("service", "fault"), FAILING, indirect=["service"])
def test_a_service_that_fails_is_told_once_and_asked_again(
    service: MetadataService, server: MetadataServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_notices, "PATIENCE_S", 3 * POLL_S)
    watch = Watch(service)
    assert watch.next(polls=3) is None
    server.fault = fault
    trouble = watch.next()
    assert trouble is not None and trouble.left_s is None and not trouble.avoid
    assert service.name in trouble.text and service.hint in trouble.text
    assert 6 * POLL_S <= watch.now_s <= 7 * POLL_S
    assert not any("elsewhere" in asked for asked in server.asked)
    assert watch.next(polls=10) is None, "told once"
    server.fault = ""
    server.answers = lambda: {
        **QUIET, **interruption(90), PREEMPTED: "TRUE", **scheduled("Preempt", 30),
    }  # fmt: skip
    after = watch.next(polls=3)
    assert after is not None and after.left_s is not None, "it answers again"


@pytest.mark.parametrize("service", ["aws"], indirect=True)
@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_a_service_that_hangs_holds_nobody_up(
    service: MetadataService, server: MetadataServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_notices, "_ANSWER_S", 0.3)
    monkeypatch.setattr(cloud_notices, "PATIENCE_S", 3 * POLL_S)
    server.fault = fault
    begun_s = time.monotonic()
    trouble = Watch(service).next()
    assert trouble is not None and "no answer within 0.3 s" in trouble.text
    assert time.monotonic() - begun_s < 30, "each question has an end"


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_a_failure_that_passes_is_not_told(service: MetadataService, server: MetadataServer) -> None:
    """Three times it fails for a little less than what is told."""
    watch, least = Watch(service), int(PATIENCE_S / POLL_S)

    def on_poll(number: int) -> None:
        server.fault = "500" if number % least else ""

    assert watch.next(polls=3 * least, on_poll=on_poll) is None


@pytest.mark.parametrize("service", ["azure"], indirect=True)
@pytest.mark.parametrize("text", ["", "[]", '{"Events": [{}]}', '{"Events": 3}', "\x00"])
def test_documents_of_another_form_are_told(service: MetadataService, server: MetadataServer, text: str) -> None:
    server.answers = lambda: {**QUIET, EVENTS: text}
    trouble = Watch(service).next()
    assert trouble is not None and trouble.key == "trouble"


@pytest.mark.parametrize("service", ["google"], indirect=True)
def test_another_server_at_the_address_is_not_google_s(service: MetadataService, server: MetadataServer) -> None:
    server.answers = lambda: {**QUIET, PREEMPTED: "<html>FALSE</html>"}
    trouble = Watch(service).next()
    assert trouble is not None and "instead of TRUE or FALSE" in trouble.text
    server.answers, server.flavor = lambda: QUIET, "Other"
    trouble = Watch(service).next()
    assert trouble is not None and "without the header Metadata-Flavor: Google" in trouble.text


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_a_service_without_tokens_is_told(service: MetadataService, server: MetadataServer) -> None:
    server.fault = "404"
    trouble = Watch(service).next()
    assert trouble is not None and "/latest/api/token answered status 404" in trouble.text


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_each_notice_is_told_once_and_the_watch_ends_when_nobody_needs_it(
    service: MetadataService, server: MetadataServer
) -> None:
    watch = Watch(service)
    server.answers = lambda: {REBALANCE: json.dumps({"noticeTime": "2026-10-27T08:22:00Z"})}
    first = watch.next()
    assert first is not None and first.key == "rebalance" and watch.next(polls=3) is None
    server.answers = lambda: {REBALANCE: json.dumps({"noticeTime": "2026-10-27T08:22:00Z"}), **interruption(90)}
    second = watch.next()
    assert second is not None and second.key == "interruption" and watch.next(polls=3) is None
