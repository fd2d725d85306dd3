"""What a doctor finds: facts and their judgement, grouping, pairs and clocks, and one look at this machine."""

from __future__ import annotations

import json
import socket
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import trainwright as tw
from trainwright import datasets
from trainwright.cli.main import app
from trainwright.core.errors import Finding, JobError
from trainwright.diagnostics import cluster_probe, diagnosis_report
from trainwright.diagnostics.cluster_probe import (
    LinkServer,
    check_cluster,
    failure_reason,
    living_nodes,
    measure_link,
    measurement_rounds,
)
from trainwright.diagnostics.diagnosis_report import Diagnosis, group_findings
from trainwright.diagnostics.machine_checks import check_machine, interface_setting_matches
from trainwright.diagnostics.machine_probe import (
    cgroup_limits,
    dataset_paths,
    delete_marks,
    disk_space,
    import_faults,
    parse_smi,
    parse_torch_cuda,
    port_range,
    probe_data_paths,
    probe_storage,
    read_marks,
    requirements,
    resolve_host,
    write_mark,
)
from trainwright.diagnostics.node_facts import (
    Accelerators,
    Clock,
    ClusterFacts,
    DataPath,
    Device,
    DiskSpace,
    HostResources,
    Interface,
    LinkMeasurement,
    MachineFacts,
    Network,
    Software,
    StorageResult,
    UnreachableNode,
)

GIB = 1 << 30
H200 = Device(index=0, kind="NVIDIA H200", driver="570.1", memory_bytes=140 * GIB, used_bytes=GIB)
NEEDS = {"ray": ">=2.60,<3", "torch": ">=2.13,<3", "tensorflow": ">=2.21,<3", "keras": ">=3.13,<4"}
SOUND = MachineFacts(
    software=Software(
        python="3.11.7",
        needs_python=">=3.11",
        packages={"trainwright": "0.1.0", "ray": "2.60.0", "torch": "2.13.0", "tensorflow": "2.21.0", "keras": "3.15"},
        needs=NEEDS,
        torch_cuda="12.6",
    ),
    accelerators=Accelerators(),
    network=Network(
        host="a",
        address="10.0.0.1",
        resolves=("10.0.0.1",),
        interfaces=(
            Interface(name="lo", address="127.0.0.1", mtu=65536),
            Interface(name="e0", address="10.0.0.1", mtu=1500),
        ),
        ports=(32768, 60999),
    ),
    resources=HostResources(
        cpus=8,
        cpus_allowed=8,
        memory_bytes=64 * GIB,
        memory_allowed_bytes=64 * GIB,
        open_files=(1024, 1 << 20),
        disks={"shared memory": DiskSpace(path="/dev/shm", size_bytes=32 * GIB, free_bytes=32 * GIB)},
    ),
    clock=Clock(time_s=2e9, synchronized=True, installed_s=1.9e9),
    storage=StorageResult(uri="s3://b/p"),
)


def changed(part: str, **fields: Any) -> MachineFacts:
    return replace(SOUND, **{part: replace(getattr(SOUND, part), **fields)})


def disk(used: float) -> MachineFacts:
    free = int((1 - used) * 1000)
    return changed("resources", disks={"/tmp": DiskSpace(path="/tmp", size_bytes=1000, free_bytes=free)})


def gpus(**fields: Any) -> MachineFacts:
    return replace(SOUND, accelerators=Accelerators(devices=(replace(H200, **fields),)))


def packages(**versions: str) -> dict[str, str]:
    return {**SOUND.software.packages, **versions}


def test_a_sound_machine_has_nothing_but_good_findings() -> None:
    assert {finding.verdict for finding in check_machine(SOUND)} == {"good"}
    assert {finding.where for finding in check_machine(SOUND, where="node-1")} == {"node-1"}


CASES: list[tuple[str, MachineFacts, str, str, str]] = [
    ("old Python", changed("software", python="3.10.1"), "bad", "Python", ">=3.11"),
    ("old ray", changed("software", packages=packages(ray="2.9.0")), "bad", "ray", "pip install 'ray>=2.60"),
    ("no ray", changed("software", packages=packages(ray="")), "bad", "ray", "pip install 'ray"),
    ("no framework", changed("software", packages=packages(torch="", tensorflow="")), "bad", "torch", "wright[torch]"),
    ("broken", changed("software", imports={"torch": "ImportError: x"}), "bad", "torch", "python -c 'import torch'"),
    ("no token", changed("software", settings={"RAY_AUTH_MODE": "token"}), "bad", "Ray's token", "get-auth-token"),
    ("threads", changed("software", settings={"OMP_NUM_THREADS": "64"}), "doubtful", "threads", "unset"),
    ("ECC", gpus(ecc_errors=3), "bad", "GPU 0", "nvidia-smi -i 0 -r"),
    ("hot", gpus(throttled=("heat (driver)",)), "doubtful", "GPU 0", "TEMPERATURE"),
    ("taken", gpus(processes=2, used_bytes=99 * GIB), "doubtful", "GPU 0", "nvidia-smi -i 0"),
    ("CPU build", replace(gpus(), software=replace(SOUND.software, torch_cuda="")), "bad", "torch", "pip install"),
    ("driver", replace(gpus(), software=replace(SOUND.software, cuda_works=False)), "bad", "torch", "newer driver"),
    ("no GPU for Ray", replace(gpus(), resources=replace(SOUND.resources, ray_gpus=0.0)), "doubtful", "GPUs",
     "--num-gpus=1"),
    ("smi fails", changed("accelerators", fault="nvidia-smi failed: x"), "bad", "GPUs", "nvidia-smi"),
    ("TPU", changed("accelerators", tpu_files=4), "bad", "TPU", "pip install libtpu"),
    ("store", changed("storage", fault="refused", remedy="set AWS_REGION"), "bad", "storage", "AWS_REGION"),
    ("twice", changed("storage", creates_once=False), "bad", "storage", "conditional"),
    ("slow store", changed("storage", write_s=3.0), "doubtful", "storage", "region"),
    ("data", replace(SOUND, data_paths=(DataPath(uri="/d", fault="it is not there"),)), "bad", "data", "shared folder"),
    ("port", changed("network", refused={"10.0.0.1": "no"}), "bad", "ports", "ip -br address"),
    ("busy", changed("network", busy=(6379,)), "doubtful", "ports", "--port=6380"),
    ("few ports", changed("network", ports=(40000, 41000)), "doubtful", "ports", "ip_local_port_range"),
    ("no network", changed("network", address="127.0.0.1"), "doubtful", "network", "ip route"),
    ("Debian's hosts", changed("network", resolves=("127.0.1.1",)), "doubtful", "host name", "instead of 127.0.1.1"),
    ("no name", changed("network", resolves=()), "doubtful", "host name", "write '10.0.0.1 a' into /etc/hosts"),
    ("other name", changed("network", resolves=("10.9.9.9",)), "doubtful", "host name", "/etc/hosts"),
    ("docker", changed("network", address="172.17.0.1", resolves=("172.17.0.1",), interfaces=(
        Interface(name="docker0", address="172.17.0.1", mtu=1500),)), "doubtful", "network", "default route"),
    ("gloo", changed("software", settings={"GLOO_SOCKET_IFNAME": "ib0"}), "bad", "GLOO_SOCKET_IFNAME", "unset"),
    ("small shm", changed("resources", disks={"shared memory": DiskSpace(path="/dev/shm", size_bytes=64 << 20,
    free_bytes=0)}),
     "doubtful", "shared memory", "size=20G"),
    ("full shm", changed("resources", disks={"shared memory": DiskSpace(path="/dev/shm", size_bytes=32 * GIB,
    free_bytes=GIB)}),
     "doubtful", "shared memory", "du"),
    ("full disk", disk(0.96), "bad", "disk", "du -xh /tmp"),
    ("nearly full disk", disk(0.92), "doubtful", "disk", "du -xh /tmp"),
    ("files", changed("resources", open_files=(1024, 4096)), "doubtful", "open files", "ulimit"),
    ("CPUs", changed("resources", cpus_allowed=2.0, ray_cpus=8.0), "doubtful", "CPUs", "--num-cpus=2"),
    ("memory", changed("resources", memory_allowed_bytes=GIB, ray_memory_bytes=9 * GIB), "doubtful", "memory",
     "--memory="),
    ("no NTP", changed("clock", synchronized=False), "doubtful", "clock", "timedatectl"),
    ("past", changed("clock", time_s=0.0), "bad", "clock", "set it"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "verdict", "subject", "remedy"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_what_is_wrong_is_found_with_its_remedy(machine: MachineFacts, verdict: str, subject: str, remedy: str) -> None:
    wrong = [finding for finding in check_machine(machine) if finding.verdict != "good"]
    hit = [finding for finding in wrong if finding.subject == subject and finding.verdict == verdict]
    assert hit and remedy in hit[0].remedy, wrong


def test_one_framework_is_enough_and_is_said() -> None:
    found = check_machine(changed("software", packages=packages(tensorflow="", keras="")))
    assert {finding.verdict for finding in found} == {"good"}
    assert any("tensorflow and keras: pip install 'trainwright[tensorflow]'" in finding.what for finding in found)


def test_in_a_cluster_no_token_is_doubtful_and_its_own_ports_may_be_taken() -> None:
    found = check_machine(changed("network", busy=(6379, 8265), ray_address="10.0.0.9"), in_cluster=True)
    assert [finding.subject for finding in found if finding.verdict != "good"] == ["Ray's token", "network"]


def cluster(**machines: MachineFacts) -> ClusterFacts:
    names = tuple(machines)
    links = tuple(
        LinkMeasurement(source=one, target=other, delay_s=1e-4, bytes_per_s=1e9)
        for pair in combinations(names, 2)
        for one, other in (pair, pair[::-1])
    )
    seen = {name: frozenset(names) for name in names}
    return ClusterFacts(
        machines=machines, links=links, seen=seen, probed_s=(SOUND.clock.time_s - 1, SOUND.clock.time_s + 1)
    )


def worse(found: list[Finding]) -> list[tuple[str, str, str]]:
    return [(finding.verdict, finding.subject, finding.where) for finding in found if finding.verdict != "good"]


def test_nodes_alike_are_good() -> None:
    found = check_cluster(cluster(a=SOUND, b=SOUND, c=SOUND))
    assert not worse(found)
    assert [finding.subject for finding in found] == ["versions", "storage", "links", "clocks"]


def test_nodes_that_differ_are_named() -> None:
    odd = changed("software", python="3.12.1", packages=packages(torch="2.14.0"))
    kinds = replace(
        gpus(), network=replace(SOUND.network, interfaces=(Interface(name="e", address="10.0.0.1", mtu=9000),))
    )
    found = check_cluster(cluster(a=SOUND, b=odd, c=SOUND, d=kinds))
    assert worse(found) == [
        ("bad", "Python", "b"), ("bad", "torch", "b"), ("doubtful", "accelerators", "d"), ("doubtful", "network", "d"),
    ]  # fmt: skip
    assert "pip install 'torch==2.13.0'" in next(each.remedy for each in found if each.subject == "torch")


def test_a_folder_that_is_not_shared_is_found_out() -> None:
    apart = replace(cluster(a=SOUND, b=SOUND), seen={"a": frozenset("a"), "b": frozenset("b")})
    assert worse(check_cluster(apart)) == [("bad", "storage", "a"), ("bad", "storage", "b")]


def test_links_that_are_cut_or_slow_are_found() -> None:
    whole = cluster(a=SOUND, b=SOUND, c=SOUND)
    cut = replace(whole.links[0], fault="10.0.0.2 port 4: no answer")
    slow = replace(whole.links[1], bytes_per_s=1e8)
    found = check_cluster(replace(whole, links=(cut, slow, *whole.links[2:])))
    assert worse(found) == [("bad", "link", "a"), ("doubtful", "link", "b from a")]
    assert "32768-60999" in next(finding.remedy for finding in found if finding.verdict == "bad")


@pytest.mark.parametrize(
    ("off_s", "verdict"), [(50.0, ""), (-50.0, ""), (100.0, "doubtful"), (-100.0, "doubtful"), (900.0, "bad")]
)
def test_a_clock_that_is_off_is_found(off_s: float, verdict: str) -> None:
    odd = replace(SOUND, clock=replace(SOUND.clock, time_s=SOUND.clock.time_s + off_s))
    found = worse(check_cluster(cluster(a=SOUND, b=odd, c=SOUND)))
    assert found == ([(verdict, "clock", "b")] if verdict else [])


@given(st.integers(2, 60))
def test_links_are_measured_around_a_ring_without_disturbing_each_other(count: int) -> None:
    nodes = [str(number) for number in range(count)]
    found = measurement_rounds(nodes)
    assert len(found) <= 3
    for pairs in found:
        assert max(Counter(node for pair in pairs for node in pair).values()) == 1
    met = [frozenset(pair) for pairs in found for pair in pairs]
    ring = {frozenset((nodes[number - 1], nodes[number])) for number in range(count)}
    assert set(met) == ring and len(met) == len(ring)


def test_nodes_that_are_absent_are_bad_and_ray_s_errors_are_understood() -> None:
    lost = {"b": UnreachableNode(reason="did not answer within 60 s", remedy="ray list nodes")}
    assert worse(check_cluster(ClusterFacts(machines={"a": SOUND}, unreachable=lost))) == [("bad", "node", "b")]
    missing = RuntimeError("The remote function failed to import on the worker.\nNo module named 'trainwright'")
    assert failure_reason(missing).reason == "trainwright cannot be imported there"
    died = type("WorkerCrashedError", (Exception,), {})("x")
    assert failure_reason(died).reason == "was lost while it was probed"
    assert failure_reason(ValueError("odd\nodder")).reason == "the probe failed there: odder"


def test_nodes_of_one_name_are_told_apart() -> None:
    node = {"Alive": True, "NodeManagerHostname": "a", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 1.0}}
    listed = [{**node, "NodeID": "1" * 20}, {**node, "NodeID": "2" * 20}, {**node, "NodeID": "3", "Alive": False}]
    assert [stop.name for stop in living_nodes(listed)] == ["a-111111", "a-222222"]


def test_good_findings_are_grouped_and_no_bad_one_is_hidden() -> None:
    good = [Finding(subject="disk", verdict="good", what=f"{n} GiB free", where=f"n{n}") for n in range(3)]
    bad = [Finding(subject="x", verdict="bad", what=f"{n} lost", where=f"n{n}", remedy="mend") for n in range(3)]
    same = [replace(each, what="lost") for each in bad]
    lines = group_findings([*good, *bad, *same])
    assert [(line.where, line.what) for line in lines] == [
        ("n0", "0 lost"), ("n1", "1 lost"), ("n2", "2 lost"), ("n0, n1, n2", "lost"),
        ("3 nodes", "0 GiB free (others alike)"),
    ]  # fmt: skip
    told = Diagnosis(subject="3 nodes", findings=(*good, *bad))
    assert told.verdict == "bad" and "3 nodes: 3 bad, 3 good" in repr(told) and "-> mend" in repr(told)
    assert "<b>3 nodes" in told._repr_html_() and json.dumps(told.data())


def test_nvidia_smi_is_read() -> None:
    line = "0, GPU-1, NVIDIA H200, 570.1, 143771, 600, 2, Not Active, Active, Not Active, Not Active"
    odd = "1, GPU-2, NVIDIA GH, 570.1, [N/A], [N/A], [N/A], Not Active, Not Active, Not Active, Not Active"
    first, second = parse_smi(f"{line}\n{odd}\n", "GPU-1\nGPU-1\n")
    assert (first.ecc_errors, first.throttled, first.processes) == (2, ("heat (hardware)",), 2)
    assert first.memory_bytes == 143771 << 20
    assert (second.ecc_errors, second.memory_bytes, second.throttled) == (None, 0, ())
    with pytest.raises(ValueError, match="gave 1 fields"):
        parse_smi("No devices were found", "")


def test_interface_settings() -> None:
    names = ["lo", "eth0", "docker0"]
    assert interface_setting_matches("eth0", names, exact=True) and not interface_setting_matches(
        "eth", names, exact=True
    )
    assert interface_setting_matches("eth", names, exact=False) and not interface_setting_matches(
        "ib", names, exact=False
    )
    assert interface_setting_matches("^docker,lo", names, exact=False) and not interface_setting_matches(
        "=eth", names, exact=False
    )


def test_files_of_the_system_are_read(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == (None, None)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cgroup_limits(tmp_path) == (None, 0.5)
    (tmp_path / "memory.max").write_text("1024\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cgroup_limits(tmp_path) == (1024, 1.5)
    (tmp_path / "range").write_text("1\t9\n")
    assert port_range(tmp_path / "range") == (1, 9) and port_range(tmp_path / "none") is None
    assert disk_space(str(tmp_path / "not" / "there")).size_bytes > 0 and disk_space("/dev/not-there").size_bytes == 0
    assert resolve_host("localhost") == ("127.0.0.1",) and resolve_host("no-such-host.invalid") == ()


def test_what_is_installed_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        parse_torch_cuda("cuda: Optional[str] = '12.6'\n") == "12.6"
        and parse_torch_cuda("cuda = None\nhip = '6'") == ""
    )
    needs_python, needs = requirements()
    assert ">=3.11" in needs_python.split(",") and ">=2.9" in needs["torch"].split(",")
    (tmp_path / "brokenpackage.py").write_text("raise ImportError('libfoo.so.1: not found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    faults = import_faults(["brokenpackage", "json"])
    assert faults == {"brokenpackage": "ImportError: libfoo.so.1: not found", "json": ""}


def test_a_storage_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    sound = probe_storage(str(tmp_path / "new" / "runs"))
    assert not sound.fault and sound.creates_once and sound.write_s > 0 and not [*tmp_path.iterdir()]
    (tmp_path / "file").write_text("")
    assert (blocked := probe_storage(str(tmp_path / "file"))).fault and blocked.remedy
    uri = str(tmp_path)
    write_mark(uri, "v", "a")
    assert read_marks(uri, "v") == {"a"}
    delete_marks(uri, "v")
    assert read_marks(uri, "v") == frozenset() and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_store_without_credentials_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert "AZURE_STORAGE_ACCOUNT_NAME" in probe_storage("az://container/prefix").remedy


def test_places_of_data_are_found_and_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    given = (datasets.parquet(tmp_path / "a"), datasets.parquet(tmp_path / "none/*.parquet"), None)
    assert [*dataset_paths(given)] == [
        str(tmp_path / "a"), str(tmp_path / "none/*.parquet"),
    ]  # fmt: skip
    found = probe_data_paths([str(tmp_path / "a"), str(tmp_path / "none/*.parquet")])
    assert [bool(place.fault) for place in found] == [False, True]


def test_a_link_is_measured_and_strangers_are_sent_away() -> None:
    listener = LinkServer(b"k" * 16)
    address = listener.address()
    found = measure_link("a", "b", address, b"k" * 16)
    assert not found.fault and found.bytes_per_s > 0 and 0 < found.delay_s < 5
    assert measure_link("a", "b", address, b"x" * 16).fault
    listener.close()
    assert "refused" in measure_link("a", "b", address, b"k" * 16).fault


def test_a_peer_that_hangs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_probe, "_SOCKET_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "no answer" in measure_link("a", "b", silent.getsockname()[:2], b"k" * 16).fault


def test_the_command_looks_at_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(diagnosis_report, "_is_connected", lambda: False)
    done = CliRunner().invoke(app, ["doctor", "--quick", "--storage", str(tmp_path / "runs"), "--json"])
    told = json.loads(done.stdout)
    assert told["subject"] == "this machine" and done.exit_code == (1 if told["verdict"] == "bad" else 0)
    assert {"Python", "packages", "storage", "disk", "clock"} <= {finding["subject"] for finding in told["findings"]}
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").write_text("")
    bad = CliRunner().invoke(app, ["doctor", "--quick", "--storage", str(tmp_path / "file")])
    assert bad.exit_code == 1 and "bad" in bad.stdout and "-> " in bad.stdout


def test_a_cluster_that_is_not_there_is_bad_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis_report, "_is_connected", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = tw.doctor(address=f"127.0.0.1:{port}", imports=False)
    assert found.findings[0].subject == "Ray" and found.verdict == "bad"
    assert "No storage was tried" in found.notes[0]


def test_a_file_that_is_no_cluster_file_is_refused() -> None:
    with pytest.raises(JobError, match=r"trainwright doctor --job job\.py"):
        tw.doctor("job.py")
