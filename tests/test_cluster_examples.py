"""The files for Slurm and Kubernetes in ``examples/cluster``: their form, and the commands in them, which run
here as two agents of torchrun on one machine. Slurm and Kubernetes themselves are not here."""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import typer
import yaml
from torch.distributed.run import get_args_parser
from warm_python import python

from mixmesh.__main__ import app

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "cluster"
SLURM, KUBERNETES = FOLDER / "slurm.sbatch", FOLDER / "kubernetes.yaml"
# what Slurm gives a batch script: the names of its machines, and srun, which starts a task on each
SHIMS = {
    "scontrol": 'test "$*" = "show hostnames two" && printf "127.0.0.1\\nother\\n"',
    "srun": 'test "$1" = --kill-on-bad-exit=1; shift; "$@" & first=$!; "$@"; wait $first',
    # a file of its own for each start: both machines' tasks begin at once
    "torchrun": 'printf "torchrun %s" "$*" > "$LAUNCHES.$$"; exec "$PYTHON" -m torch.distributed.run "$@"',
}


def parsed(command: list[str]) -> tuple[dict, str, dict]:
    """The options of torchrun, and the command of mixmesh with its options, in one line."""
    assert command[0] == "torchrun"
    launch = get_args_parser().parse_args(command[1:])
    assert launch.module and launch.training_script == "mixmesh"
    name, *arguments = launch.training_script_args
    mixmesh = typer.main.get_command(app).commands[name].make_context(name, arguments)
    return vars(launch), name, mixmesh.params


def words(container: dict) -> list[str]:
    """The command of a container as torchrun and its arguments, within a line for the shell too."""
    shell, *rest = container["command"]
    return shlex.split(re.search(r"torchrun .+(?= && )", rest[1])[0]) if shell == "sh" else [shell, *rest]


def kubernetes() -> tuple[dict, dict]:
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    return service, job


def test_pods_find_each_other():
    service, job = kubernetes()
    pod = job["spec"]["template"]["spec"]
    assert service["kind"] == "Service" and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["publishNotReadyAddresses"] and pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    ports = set()
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["resources"]["limits"]["nvidia.com/gpu"] >= 1
        launch, _, _ = parsed(words(container))
        first, port = launch["rdzv_endpoint"].split(":")
        assert first == f"{job['metadata']['name']}-0.{pod['subdomain']}"
        assert int(launch["nnodes"].rpartition(":")[2]) == job["spec"]["completions"]
        ports.add(port)
    assert len(ports) == 2  # a pod may train while another one is still examined


def test_commands_are_those_of_torchrun_and_mixmesh():
    """And the same for both launchers."""
    _, job = kubernetes()
    pod = job["spec"]["template"]["spec"]
    of_pods = [parsed(words(c)) for c in (*pod["initContainers"], *pod["containers"])]
    assert subprocess.run(["bash", "-n", SLURM], capture_output=True).stderr == b""
    assert [name for _, name, _ in of_pods] == ["doctor", "run"]
    for launch, _, options in of_pods:
        assert (launch["rdzv_backend"], launch["nproc_per_node"]) == ("c10d", "gpu")
        assert options["job"] == "train.py"
    assert of_pods[1][2]["epochs"] == 1


def test_a_lost_pod_is_replaced_and_the_others_go_on():
    """All that it takes is on the claim, and the ranks that are left may train without it."""
    _, job = kubernetes()
    pod = job["spec"]["template"]["spec"]
    (train,) = pod["containers"]
    launch, _, options = parsed(words(train))
    assert job["spec"]["backoffLimit"] >= 20 and launch["max_restarts"] >= 20
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]  # only for pods that never restart
    assert rule["action"] == "Ignore" and rule["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert launch["nnodes"] == f"1:{job['spec']['completions']}"
    claims = {v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    kept = [Path(m["mountPath"]) for m in train["volumeMounts"] if m["name"] in claims]
    environment = {e["name"]: e.get("value") for e in train["env"]}
    for path in (options["checkpoint"], Path(environment["MIXMESH_CACHE"]), options["save"]):
        assert kept[0] in path.parents
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # or pods that come later wait for ever


def test_a_pod_that_comes_later_is_not_examined(tmp_path):
    """The init container's own line, with a torchrun that notes that it was started, and fails at first."""
    _, job = kubernetes()
    (doctor,) = job["spec"]["template"]["spec"]["initContainers"]
    shim = tmp_path / "torchrun"
    shim.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\ntest -e {tmp_path}/all-is-well\n')
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    command = [word.replace("/out/", f"{tmp_path}/") for word in doctor["command"]]
    statuses = []
    for uid in ("a", "a", "a", "b"):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_UID": uid}
        statuses.append(subprocess.run(command, env=environment, timeout=60).returncode)
        (tmp_path / "all-is-well").touch()
    assert statuses == [1, 0, 0, 0]
    assert len((tmp_path / "starts").read_text().splitlines()) == 3  # twice for a, once for b


def test_the_directives_of_slurm():
    text = SLURM.read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.M))
    assert directives["nodes"] == "2" and directives["ntasks-per-node"] == "1"
    commands = text[text.index("JOB=$") :].rstrip()
    assert commands in (ROOT / "docs" / "guide" / "launching.md").read_text(), "the page shows other commands"
    assert text.startswith("#!/bin/bash\n") and text.index("#SBATCH --output") < text.index("set -euo")


def job_of_free_port() -> int:
    """The number of a job of which the script makes a port that is free."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def test_the_batch_script_runs_as_two_agents(tmp_path):
    for name, body in SHIMS.items():
        shim = tmp_path / name
        shim.write_text(f"#!/bin/bash\n{body}\n")
        shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    job = tmp_path / "train.py"
    job.write_text(
        "import torch, mixmesh\n"
        "def job():\n"
        "    torch.manual_seed(0)\n"
        "    batches = [(torch.randn(4, 3),) for _ in range(3)]\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Flatten(0))\n"
        "    model.forward = lambda x: torch.nn.Sequential.forward(model, x).square().mean()\n"
        "    return mixmesh.Job(model, batches[0], data=batches)\n"
    )
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MIXMESH_CACHE": str(tmp_path / "cache"),
        "LAUNCHES": str(tmp_path / "launches"),
        "PYTHON": python(),
        "SLURM_JOB_ID": str(job_of_free_port()),
        "SLURM_JOB_NODELIST": "two",
        "SLURM_NNODES": "2",
        "DEVICES": "1",
    }
    done = subprocess.run(
        ["bash", SLURM, str(job), "--profile-seconds=0"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 pair of machines, both ways" in done.stdout and "all is well" in done.stdout
    assert "3 steps, loss" in done.stdout and (tmp_path / "model.safetensors").is_file()
    launches = [parsed(shlex.split(file.read_text())) for file in tmp_path.glob("launches.*")]
    assert sorted(name for _, name, _ in launches) == ["doctor", "doctor", "run", "run"]
    assert {launch["nnodes"] for launch, _, _ in launches} == {"2"}
    assert {(name, launch["max_restarts"]) for launch, name, _ in launches} == {("doctor", 0), ("run", 20)}
    assert len({launch["rdzv_id"] for launch, _, _ in launches}) == 2
