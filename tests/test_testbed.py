import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mixmesh.cluster import Cluster
from mixmesh.errors import DeviceLost, InputError, TestbedUnavailable
from mixmesh.measure import testbed
from mixmesh.measure.testbed import cgroups, emulated, journal, network

CAPABILITY = testbed.probe()
emulation = pytest.mark.skipif(not CAPABILITY.possible, reason=str(CAPABILITY))
pytestmark = [pytest.mark.timeout(60), pytest.mark.xdist_group("testbed")]

CLUSTER = """
[network]
bandwidth_gbit_per_s = 0.1
latency_us = 30
[[machine]]
name = "alpha"
devices = [{ cpu_share = 0.5 }, { cpu_share = 0.25, memory_gib = 0.125 }]
[[machine]]
name = "beta box"
devices = [{ cpu_share = 0.25, name = "slow" }]
"""
NAMES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME"
SHOW = f"""
import json, os, socket
names = "{NAMES} OMP_NUM_THREADS MKL_NUM_THREADS MIXMESH_TESTBED MIXMESH_EMULATION MIXMESH_EMULATED"
print(json.dumps({{name: os.environ.get(name) for name in names.split()}} | {{
    "host": socket.gethostname(), "address": socket.gethostbyname(socket.gethostname())
}}))
"""
SPIN = """
import json, os, time
from mixmesh.measure import testbed

def share(wall_s):
    start, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() < start + wall_s:
        pass
    return (time.thread_time() - used) / (time.perf_counter() - start)

entered = testbed.enter_device()
inside = share({seconds})
left = testbed.leave_device()
outside = share(0.3) if os.environ["RANK"] != "0" else None  # two cores: two at full speed
print(json.dumps([entered, inside, left, outside, testbed.device_memory_peak_bytes()]))
"""


@pytest.fixture
def cluster():
    return Cluster.parse(CLUSTER)


class Output:
    """What the ranks wrote, by rank and stream."""

    def __init__(self):
        self.text = {}

    def __call__(self, rank, stream, text):
        self.text[rank, stream] = self.text.get((rank, stream), "") + text

    def json(self, rank):
        return json.loads(self.text[rank, "stdout"].splitlines()[-1])


def python(code):
    return [sys.executable, "-c", code]


def leftovers(pid):
    """What a launcher with this process id has left: its journals and what they list."""
    found = []
    for path in journal.directory().glob("mm*.json"):
        record = journal.load(path)
        if record is not None and record.pid == pid:
            found += [str(path), *filter(os.path.exists, record.cgroups)]
            found += [name for name in record.namespaces if os.path.exists(f"/run/netns/{name}")]
    return found


@emulation
def test_every_device_runs_the_command_with_its_environment(cluster):
    output = Output()
    result = testbed.run(cluster, python(SHOW), on_output=output, env={"MKL_NUM_THREADS": "2"})
    assert result.ok and result.emulation == "quota"
    expected = [("alpha", "0", "2", "0"), ("alpha", "1", "2", "0"), ("beta-box", "0", "1", "1")]
    assert [output.json(rank)["address"] for rank in range(3)] == ["10.77.0.1", "10.77.0.1", "10.77.0.2"]
    for rank, (host, local_rank, local_size, group) in enumerate(expected):
        seen = output.json(rank)
        assert (seen["host"], seen["LOCAL_RANK"], seen["LOCAL_WORLD_SIZE"], seen["GROUP_RANK"]) == (
            host,
            local_rank,
            local_size,
            group,
        )
        assert (seen["RANK"], seen["WORLD_SIZE"]) == (str(rank), "3")
        assert (seen["MASTER_ADDR"], seen["GLOO_SOCKET_IFNAME"]) == ("10.77.0.1", "eth0")
        assert (seen["OMP_NUM_THREADS"], seen["MKL_NUM_THREADS"]) == ("1", "2")
        assert (seen["MIXMESH_TESTBED"], seen["MIXMESH_EMULATION"]) == ("1", "quota")
        assert seen["MIXMESH_EMULATED"] == f"quota {cluster.fingerprint}"
    for rank in result.ranks:
        assert rank.returncode == 0 and 0 < rank.cpu_s < 5
        assert 2**20 < rank.memory_peak_bytes < rank.memory_limit_bytes
    assert leftovers(os.getpid()) == []


@emulation
def test_only_rank_0_writes_to_stdout(cluster, capfd):
    script = "echo out $RANK; echo err $RANK >&2; printf end"
    testbed.run(cluster, ["sh", "-c", script])
    out, err = capfd.readouterr()
    assert out == "out 0\nend"
    lines = [line for line in err.splitlines() if line.startswith("[rank")]
    assert sorted(lines) == sorted(
        ["[rank 0] err 0"]
        + [f"[rank {r}] {text}" for r in (1, 2) for text in (f"err {r}", f"out {r}", "end")]
    )


@emulation
def test_shares_hold_once_a_thread_has_entered(cluster):
    devices = cluster.devices
    most_inside, most_outside = [0.0] * len(devices), [0.0] * len(devices)
    for _ in range(4):  # other programs may want the cores meanwhile: the most that a rank gets in a few runs
        output = Output()
        result = testbed.run(cluster, python(SPIN.format(seconds=2)), on_output=output)
        for rank, device in enumerate(devices):
            entered, inside, left, outside, peak = output.json(rank)
            assert entered and left
            assert inside < 1.15 * device.cpu_share
            assert 2**20 < peak <= result.ranks[rank].memory_peak_bytes
            assert result.ranks[rank].throttled_s > 0
            most_inside[rank] = max(most_inside[rank], inside)
            most_outside[rank] = max(most_outside[rank], outside or 0)
        full = all(1.5 * inside > 1.15 * device.cpu_share for inside, device in zip(most_inside, devices))
        free = all(outside > 1.5 * device.cpu_share for outside, device in zip(most_outside[1:], devices[1:]))
        if full and free:
            return
    raise AssertionError((most_inside, most_outside))


TRANSFER = """
import os, socket, time
rank, port, size = int(os.environ["RANK"]), 29600, {size}
if rank == 0:
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
        received, start = len(connection.recv(1)), time.perf_counter()
        while data := connection.recv(1 << 20):
            received += len(data)
        print(received * 8 / (time.perf_counter() - start))
elif rank == 2:
    for attempt in range(100):
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    connection.sendall(bytes(size))
    connection.close()
"""


@emulation
def test_rates_hold_and_can_be_changed(cluster):
    output = Output()
    testbed.run(cluster, python(TRANSFER.format(size=12_500_000)), on_output=output)
    assert output.json(0) == pytest.approx(100e6, rel=0.15)
    with testbed.Testbed(cluster, on_output=output) as bed:
        bed.set_rate(1, 50e6)
        bed.set_rate(0, 50e6)
        bed.spawn(python(TRANSFER.format(size=25_000_000)))
        bed.wait()
    assert output.json(0) == pytest.approx(400e6, rel=0.15)


@emulation
def test_shares_can_be_changed_while_a_job_runs(cluster):
    output = Output()
    with testbed.Testbed(cluster, on_output=output) as bed:
        bed.set_share(0, 0.2)
        bed.spawn(python(SPIN.format(seconds=1.5)))
        bed.poll(0.2)
        bed.set_share(0, 0.4)
        bed.wait()
        with pytest.raises(InputError):
            bed.set_share(0, 0)
        with pytest.raises(InputError, match="used"):
            bed.spawn(["true"])
    assert 0.25 < output.json(0)[1] < 0.45


@emulation
def test_a_rank_over_its_memory_is_named_with_limit_and_peak(cluster):
    code = "import os, time; x = bytearray(300 << 20) if os.environ['RANK'] == '1' else time.sleep(30)"
    start = time.monotonic()
    with pytest.raises(DeviceLost) as caught:
        testbed.run(cluster, python(code))
    message = str(caught.value)
    assert "rank 1 (cpu@0.25)" in message and '"alpha"' in message and "memory limit" in message
    assert "at most 128.0 MiB" in message and "a peak of 128.0 MiB" in message and "SIGKILL" in message
    assert time.monotonic() - start < 8
    assert leftovers(os.getpid()) == []


TALK = """
import mmap, os, socket, sys, time
from mixmesh.measure import testbed
print("joined", testbed.join_device(), socket.gethostname(), os.path.exists(sys.argv[2] + "/file"))
print("boot", open("/proc/sys/kernel/random/boot_id").read().strip())
was_up, kept = None, []
while True:
    with mmap.mmap(-1, 2 << 20) as memory:
        memory.write(bytes(2 << 20))
    try:
        socket.create_connection((sys.argv[1], 4000), timeout=0.2).close()
        is_up = True
    except OSError:
        is_up = False
    if is_up != was_up:
        print("up" if is_up else "down")
        was_up = is_up
    time.sleep(0.02)
"""
LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 4000)) as server:
    while True:
        server.accept()[0].close()
"""


@emulation
def test_launchers_on_machines_see_links_memory_and_a_disk_that_change(cluster):
    said: list[tuple[int, str]] = []
    with testbed.Testbed(cluster, on_output=lambda n, stream, text: said.append((n, text.strip()))) as bed:

        def wait_for(number: int, text: str, since: int = 0) -> None:
            deadline = time.monotonic() + 20
            while (number, text) not in said[since:]:
                assert time.monotonic() < deadline, (said, text)
                bed.poll(0.02)

        disk = bed.make_disk(2**20)
        (disk / "file").write_bytes(bytes(2**19))
        with pytest.raises(OSError, match="No space"):
            (disk / "more").write_bytes(bytes(2**20))
        bed.start(None, [*python(LISTEN), bed.address(None)])
        one, other = (bed.start(m, [*python(TALK), bed.address(None), str(disk)]) for m in (1, 0))
        wait_for(one, "joined True beta-box True")
        wait_for(other, "joined False alpha True")  # two devices: which one is not said
        wait_for(one, "up")
        wait_for(other, "up")
        assert len({text for _, text in said if text.startswith("boot ")}) == 2
        bed.set_link(1, False)
        wait_for(one, "down")
        count = len(said)
        bed.set_link(1, True)
        wait_for(one, "up", count)
        assert (other, "down") not in said
        bed.take_memory(2)
        while bed.returncode(one) is None:
            bed.poll(0.02)
        assert bed.returncode(one) == -signal.SIGKILL and bed.returncode(other) is None
        bed.return_memory(2)
        again = bed.start(1, [*python(TALK), bed.address(None), str(disk)])
        wait_for(again, "up")
    assert not disk.exists() and not os.path.exists(f"/proc/{bed.pid(again)}")


FAIL = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '2' else time.sleep(30)"


@emulation
def test_a_failing_rank_ends_the_others(cluster):
    start = time.monotonic()
    result = testbed.run(cluster, python(FAIL), check=False)
    assert time.monotonic() - start < 8
    assert "rank 2 (slow)" in str(result.lost) and '"beta box"' in str(result.lost)
    assert "exit status 7" in str(result.lost)
    assert [r.returncode for r in result.ranks] == [-15, -15, 7]
    assert [r.ended_by_launcher for r in result.ranks] == [True, True, False]
    assert not result.ok


@emulation
def test_time_limit_and_a_missing_program(cluster):
    with pytest.raises(DeviceLost, match="did not end within 0.5 s") as caught:
        testbed.run(cluster, ["sleep", "30"], timeout_s=0.5)
    assert "rank 0, rank 1, rank 2" in str(caught.value)
    with pytest.raises(InputError, match="cannot run no-such-program"):
        testbed.run(cluster, ["no-such-program"])
    assert leftovers(os.getpid()) == []


LAUNCHER = f"""
import sys
from mixmesh.measure import testbed
from mixmesh.cluster import Cluster
testbed.run(Cluster.parse({CLUSTER!r}), ["sh", "-c", "sleep 60 & echo started; sleep 60"])
"""


def start_launcher():
    launcher = subprocess.Popen(
        python(LAUNCHER),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell starts what runs in its background with interrupts ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert launcher.stdout.readline() == "started\n"
    return launcher


@emulation
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_leaves_nothing(number):
    launcher = start_launcher()
    assert leftovers(launcher.pid) != []
    launcher.send_signal(number)
    launcher.communicate(timeout=10)
    assert launcher.returncode in (-number, 128 + number)
    assert leftovers(launcher.pid) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_run_even_if_a_finalizer_hides_it(cluster, number):
    class Thing:
        def __del__(self):
            signal.raise_signal(number)  # Python prints what the handler raises here, and goes on

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        error = KeyboardInterrupt if number == signal.SIGINT else SystemExit
        with pytest.raises(error), testbed.PlainBed(cluster) as bed:
            bed.spawn(["sleep", "30"])
            Thing()
            bed.wait(timeout_s=5)
    finally:
        signal.signal(signal.SIGINT, before)


@emulation
def test_a_killed_launcher_is_swept_by_the_next(cluster):
    launcher = start_launcher()
    launcher.kill()
    launcher.communicate(timeout=10)
    stale = leftovers(launcher.pid)
    assert len(stale) > 10
    testbed.run(cluster, ["true"])
    assert leftovers(launcher.pid) == []
    assert not any(os.path.exists(path) for path in stale)
    assert [p for p in journal.directory().iterdir() if p.name[:10] == os.path.basename(stale[0])[:10]] == []


def test_a_live_journal_and_a_foreign_file_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "directory", lambda: tmp_path)
    alive = journal.Journal("mm00000000", os.getpid(), journal.start_time(os.getpid()), (), ())
    alive.save()
    victim = tmp_path / "precious"
    victim.mkdir()
    foreign = journal.Journal("mm00000001", 2**22 + 1, "0", ("production",), (str(victim),))
    foreign.save()
    (tmp_path / "mm00000002.json").write_text("not json")
    assert testbed.sweep() == 0
    assert alive.path.exists() and foreign.path.exists() and victim.exists()


def test_the_plain_run_says_what_it_is(cluster, monkeypatch, capfd):
    monkeypatch.setenv("MIXMESH_TESTBED_FORCE_PLAIN", "1")
    assert not testbed.probe().possible
    output = Output()
    result = testbed.run(cluster, python(SHOW), on_output=output)
    message = capfd.readouterr().err
    assert "MIXMESH_TESTBED_FORCE_PLAIN is set" in message and "nothing about the mixed cluster" in message
    assert result.ok and result.emulation == "none"
    seen = output.json(2)
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["GROUP_RANK"]) == ("2", "0", "1")
    assert (seen["MASTER_ADDR"], seen["MIXMESH_EMULATION"]) == ("127.0.0.1", "none")
    assert 1024 < int(seen["MASTER_PORT"]) < 65536
    assert all(
        r.cpu_s > 0 and r.memory_peak_bytes > 2**20 and r.memory_limit_bytes is None for r in result.ranks
    )
    with pytest.raises(TestbedUnavailable, match="cannot be emulated"):
        testbed.run(cluster, ["true"], fallback="error")


def test_the_plain_run_ends_with_a_failing_rank(cluster):
    with testbed.PlainBed(cluster) as bed:
        bed.spawn(python(FAIL))
        with pytest.raises(DeviceLost, match="rank 2"):
            bed.wait(grace_s=0.1)
        with pytest.raises(TestbedUnavailable):
            bed.set_rate(0, 1e6)


def test_outside_the_testbed_nothing_happens(monkeypatch, tmp_path):
    for name in ("MIXMESH_COMPUTE_TASKS", "MIXMESH_FREE_TASKS", "MIXMESH_MEMORY_PEAK_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert testbed.enter_device() is False and testbed.leave_device() is False
    assert testbed.device_memory_peak_bytes() is None
    monkeypatch.setenv("MIXMESH_COMPUTE_TASKS", str(tmp_path / "missing" / "tasks"))
    with pytest.raises(TestbedUnavailable, match="cannot move this thread"):
        testbed.enter_device()


def test_warnings_about_shares():
    def texts(devices):
        return emulated.warnings(Cluster.parse(f"[[machine]]\ndevices = [{devices}]"))

    assert texts("{ cpu_share = 0.2 }") == []
    assert "add up to" in texts(f"{{ cpu_share = 1, count = {len(os.sched_getaffinity(0))} }}")[0]
    assert "no cpu_share" in texts("'T4-16GB'")[0]


def test_settings():
    assert cgroups.quota_us(0.35) == (7000, 20000)
    quota, period = cgroups.quota_us(0.01)  # the kernel takes no quota below 1 ms
    assert quota >= 1000 and quota / period == pytest.approx(0.01)
    assert network.burst_bytes(125e6) == 70_000 and network.burst_bytes(1.25e9) == 625_000
    assert emulated.host_name("my box/1") == b"my-box-1"


def test_cgroup_v2_writes_what_the_kernel_documents(tmp_path):
    # no such kernel here: a plain directory stands in for the file system
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")
    groups = cgroups.CgroupsV2(str(tmp_path), "mm0", 1)
    groups.create()
    groups.set_share(0, 0.5)
    groups.set_memory(0, 1 << 30)
    rank = tmp_path / "mm0" / "r0"
    assert (rank / "compute" / "cgroup.type").read_text() == "threaded"
    assert (rank / "compute" / "cpu.max").read_text() == "10000 20000"
    assert (rank / "memory.max").read_text() == str(1 << 30)
    assert groups.join_files(0) == (f"{rank}/free/cgroup.procs",)
    assert groups.worker_env(0)["MIXMESH_COMPUTE_TASKS"] == f"{rank}/compute/cgroup.threads"
    (rank / "cpu.stat").write_text("usage_usec 1500000\n")
    (rank / "compute" / "cpu.stat").write_text("throttled_usec 250000\n")
    (rank / "memory.peak").write_text("4096\n")
    (rank / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert groups.audit(0) == cgroups.Audit(1.5, 0.25, 4096, 1)
