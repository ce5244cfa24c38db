"""The launch scripts: the commands they would run, and a real run of the local one."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import fork_main
import pytest
import yaml

ROOT = Path(__file__).parent.parent
ARGUMENTS = ["--config=configs/vit_t_digits.py", "--workdir=/shared/a run", "--config.seed=1"]
SLICE = ["--name=slice", "--zone=us-west4-a", "--dry_run"]
SCRIPTS = ["local.sh", "slurm.sh", "tpu_pod.sh", "gke/gke.sh"]


def launch(script, *arguments, **environment):
    return subprocess.run(
        [ROOT / "launch" / script, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def planned(script, *arguments):
    """The commands that a dry run prints, as lists of words."""
    result = launch(script, *arguments)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("+ ")]
    return [shlex.split(line[2:]) for line in lines]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_option(script):
    result = launch(script, "--help")
    assert result.returncode == 0
    text = (ROOT / "launch" / script).read_text()
    options = {word for word in text.split() if word.startswith("--") and word.endswith("=*)")}
    assert options
    for option in options:
        assert option.removesuffix("*)") in result.stdout
    assert "--dry_run" in result.stdout
    assert "set -e" not in result.stdout
    folder, name = (ROOT / "launch" / script).parent, Path(script).name
    there = subprocess.run([f"./{name}", "--help"], cwd=folder, capture_output=True, text=True)
    assert there.stdout == result.stdout


def test_local_starts_one_process_per_gpu_or_on_virtual_devices():
    gpus = planned("local.sh", "--processes=3", "--dry_run", "--", *ARGUMENTS)
    assert len(gpus) == 3
    for i, words in enumerate(gpus):
        assert words[:2] == ["env", f"CUDA_VISIBLE_DEVICES={i}"]
        assert words[3:8] == ["-m", "structinit_jax.main", *ARGUMENTS]
        assert words[8:] == [
            "--coordinator_address=127.0.0.1:8476",
            "--num_processes=3",
            f"--process_id={i}",
        ]
    options = ["--processes=2", "--dry_run", "--", *ARGUMENTS]
    lent = launch("local.sh", *options, CUDA_VISIBLE_DEVICES="4,GPU-5,6").stdout
    assert re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", lent) == ["4", "GPU-5"]
    too_few = launch("local.sh", *options, CUDA_VISIBLE_DEVICES="4")
    assert "--processes=2, but CUDA_VISIBLE_DEVICES=4 has 1" in too_few.stderr
    words = planned("local.sh", "--cpu_devices=4", "--dry_run", "--", *ARGUMENTS)[1]
    kept = os.environ["XLA_FLAGS"]
    assert f"XLA_FLAGS={kept} --xla_force_host_platform_device_count=4" in words


def test_slurm_submits_one_task_per_gpu():
    options = ["--nodes=2", "--gpus=4", "--time=1:00:00", "--account=lab"]
    (words,) = planned("slurm.sh", *options, "--dry_run", "--", *ARGUMENTS)
    assert words[0] == "sbatch"
    assert {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4"} <= set(words)
    assert words[-6:] == ["--time=1:00:00", "--account=lab", "launch/slurm.sbatch", *ARGUMENTS]
    assert planned("slurm.sh", "--cancel", "--dry_run") == [
        ["scancel", "--name=structinit_jax", "--me"]
    ]


@pytest.fixture
def slurm(tmp_path):
    """An `srun` that runs its command here and an `scontrol` that records its arguments."""
    for name, line in (
        ("srun", f'echo "$1" > {tmp_path / "cores"}; shift 2; exec "$@"'),
        ("scontrol", f'echo "$@" >> {tmp_path / "calls"}'),
        ("trainer", 'exit "${4#--status=}"'),
    ):
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{line}\n")
        path.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "trainer"),
        "SLURM_JOB_ID": "42",
        "SLURM_CPUS_PER_TASK": "8",
    }


@pytest.mark.parametrize("status", [0, 1, 75])
def test_a_slurm_job_requeues_itself_only_if_it_was_stopped(slurm, tmp_path, status):
    # The trainer gets `-m structinit_jax.main` and then the arguments.
    result = launch("slurm.sbatch", "--config=c", f"--status={status}", **slurm)
    assert result.returncode == status
    assert (tmp_path / "cores").read_text() == "--cpus-per-task=8\n"
    assert (tmp_path / "calls").exists() == (status == 75)
    if status == 75:
        assert (tmp_path / "calls").read_text() == "requeue 42\n"


def test_tpu_runs_on_all_workers_at_once():
    (create,) = planned("tpu_pod.sh", "create", *SLICE, "--type=v4-32", "--spot")
    assert create[3:7] == ["queued-resources", "create", "slice", "--node-id=slice"]
    assert {"--accelerator-type=v4-32", "--spot", "--zone=us-west4-a"} <= set(create)
    install = planned("tpu_pod.sh", "install", *SLICE)
    assert [words[0] for words in install] == ["git", "gcloud", "gcloud"]
    assert all("--worker=all" in words for words in install[1:])
    assert install[2][-1].endswith("bash structinit_jax/launch/tpu_install.sh ")
    mounted = planned("tpu_pod.sh", "install", *SLICE, "--bucket=gs://data")
    assert mounted[2][-1].endswith("tpu_install.sh data")
    (run,) = planned("tpu_pod.sh", "run", *SLICE, "--", *ARGUMENTS)
    assert "--worker=all" in run
    remote = run[-1].removeprefix("--command=")
    assert "nohup flock --nonblock ~/run.lock" in remote
    words = shlex.split(remote)
    start = words.index("structinit_jax.main")
    assert words[start : start + 4] == ["structinit_jax.main", *ARGUMENTS]
    assert planned("tpu_pod.sh", "logs", *SLICE)[0][-2] == "--worker=0"
    assert "pkill -TERM" in planned("tpu_pod.sh", "stop", *SLICE)[0][-1]
    (delete,) = planned("tpu_pod.sh", "delete", *SLICE)
    assert {"delete", "--force", "--quiet"} <= set(delete)


@pytest.mark.parametrize(
    ("type_", "version"),
    [
        ("v4-32", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-16", "v2-alpha-tpuv6e"),
    ],
)
def test_the_runtime_fits_the_type_of_tpu(type_, version):
    (create,) = planned("tpu_pod.sh", "create", *SLICE, f"--type={type_}")
    assert f"--runtime-version={version}" in create


# Stand-ins for the programs that the scripts call: the worker is a folder on this machine.
GCLOUD = """
cd "$WORKER" && export HOME=$WORKER
for last; do :; done
case "$*" in
  *" scp "*) cp "$5" . ;;
  *" ssh "*) exec bash -c "${last#--command=}" ;;
esac
"""
UV = """
echo "uv $*"
[[ $1 != venv ]] || mkdir -p ~/venv
exit "$UV_STATUS"
"""


@pytest.mark.parametrize("status", [0, 2])
def test_a_tpu_worker_says_whether_it_was_installed(tmp_path, status):
    worker = tmp_path / "worker"
    worker.mkdir()
    for name, text in (("gcloud", GCLOUD), ("uv", UV)):
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{text}")
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "WORKER": str(worker),
        "UV_STATUS": str(status),
    }
    where = SLICE[:-1]
    result = launch("tpu_pod.sh", "run", *where, "--", *ARGUMENTS, **environment)
    assert result.returncode == 1
    assert "is not installed: run install" in result.stderr
    result = launch("tpu_pod.sh", "install", *where, **environment)
    assert result.returncode == status
    assert ("error: install failed on" in result.stderr) == bool(status)
    assert ("uv venv --clear --python >=3.11" in result.stderr) == bool(status)
    assert (worker / "installed").exists() == (not status)
    log = (worker / "install.log").read_text()
    assert (".[train,tpu,gcs]" in log) == (not status)


def manifest_of(result):
    text = result.stdout.split("\n", 1)[1]
    assert "@" not in text.split("apiVersion", 1)[1].replace('"$@"', "")
    return yaml.safe_load(text)


@pytest.mark.parametrize(
    ("slice_", "accelerator", "nodes", "chips"),
    [
        ("v5e:4x4", "tpu-v5-lite-podslice", 4, 4),
        ("v5e:2x4", "tpu-v5-lite-podslice", 1, 8),
        ("v6e:2x2", "tpu-v6e-slice", 1, 4),
        ("v4:2x2x2", "tpu-v4-podslice", 2, 4),
        ("v5p:2x2x4", "tpu-v5p-slice", 4, 4),
    ],
)
def test_gke_starts_one_pod_per_host_of_a_slice(slice_, accelerator, nodes, chips):
    options = [f"--tpu={slice_}", "--image=x", "--dry_run"]
    (job,) = manifest_of(launch("gke/gke.sh", *options, "--", *ARGUMENTS))["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == nodes
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": slice_.split(":")[1],
    }
    (container,) = pod["containers"]
    assert container["args"] == ARGUMENTS
    assert container["resources"]["limits"] == {"google.com/tpu": chips}


def test_a_single_gke_node_waits_for_no_other():
    result = launch("gke/gke.sh", "--image=x", "--dry_run", "--", *ARGUMENTS)
    (job,) = manifest_of(result)["spec"]["replicatedJobs"]
    script = job["template"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert script.endswith('structinit_jax.main "$@" --num_processes=1')


def test_skypilot_joins_the_nodes():
    """`sky.Task.from_yaml_config` of SkyPilot 0.14.1 accepts the file."""
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    assert task["envs"]["WORKDIR"] is None  # to be given
    assert "'.[train,cuda12,gcs,s3]'" in task["setup"]
    script = task["run"].replace("~/venv/bin/python", "echo").replace("exec", "")
    nodes = dict(SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NUM_NODES="2")
    result = subprocess.run(
        ["bash", "-c", script],
        env=os.environ | task["envs"] | nodes | dict(SKYPILOT_NODE_RANK="1", WORKDIR="s3://b/r"),
        capture_output=True,
        text=True,
    )
    assert result.stdout.split()[2:] == [
        task["envs"]["ARGUMENTS"],
        "--workdir=s3://b/r",
        "--coordinator_address=10.0.0.1:8476",
        "--num_processes=2",
        "--process_id=1",
    ]


def test_gke_applies_a_whole_manifest():
    arguments = ["--config=configs/vit_2025_imagenet.py", "--config.data.train_split='it''s'"]
    options = ["--image=registry/x:1", "--nodes=4", "--claim=disk", "--dry_run"]
    result = launch("gke/gke.sh", *options, "--", *arguments)
    assert result.stdout.startswith("+ kubectl apply --filename=-")
    manifest = yaml.safe_load(result.stdout.split("\n", 1)[1])
    assert manifest["kind"] == "JobSet"
    (job,) = manifest["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == 4
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry/x:1"
    assert container["args"] == arguments
    script = container["command"][2]
    assert "--num_processes=4" in script
    assert "--coordinator_address=structinit-jax-workers-0-0.structinit-jax:8476" in script
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert "@" not in result.stdout.replace('"$@"', "").split("apiVersion")[1]


@pytest.mark.parametrize(
    ("script", "arguments", "word"),
    [
        ("local.sh", [], "structinit_jax.main after --"),
        ("local.sh", ["--config=x"], "--config=x"),
        ("local.sh", ["--processes=none", "--", "x"], "--processes=none"),
        ("local.sh", ["--processes=", "--", "x"], "--processes=VALUE"),
        ("local.sh", ["--cpu_devices=four", "--", "x"], "--cpu_devices=four"),
        ("local.sh", ["--port=http", "--", "x"], "--port=http"),
        ("slurm.sh", ["--dry_run"], "structinit_jax.main after --"),
        ("slurm.sh", ["--node=2"], "--node=2"),
        ("tpu_pod.sh", [], "--name=NAME"),
        ("tpu_pod.sh", ["run", "--name=x"], "--zone=ZONE"),
        ("tpu_pod.sh", ["start", *SLICE], "'start'"),
        ("tpu_pod.sh", ["run", *SLICE], "structinit_jax.main after --"),
        ("tpu_pod.sh", ["create", *SLICE, "--type=v2-8"], "--type=v2-8"),
        ("gke/gke.sh", ["--dry_run", "--", "x"], "--image=IMAGE"),
        ("gke/gke.sh", ["--tpu=v5e", "--image=x", "--", "x"], "--tpu=v5e must be v4"),
    ],
)
def test_mistakes_end_with_a_message_that_names_them(script, arguments, word):
    result = launch(script, *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert word in result.stderr


def test_local_does_not_share_the_port_of_another_run():
    with socket.create_server(("127.0.0.1", fork_main.free_port())) as other:
        option = f"--port={other.getsockname()[1]}"
        result = launch("local.sh", option, "--", "x", PYTHON="true")
        assert (result.returncode, result.stdout) == (1, "")
        assert f"error: {option} is in use" in result.stderr
        assert planned("local.sh", option, "--dry_run", "--", "x")
    assert launch("local.sh", option, "--", "x", PYTHON="true").returncode == 0


TRAINER = """#!/usr/bin/env bash
trap 'exit 75' TERM
[[ $* != *--process_id=1* ]] || {fails} || exit 3
echo started
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(("fails", "status"), [("true", 75), ("false", 3)])
def test_local_ends_all_processes_together(tmp_path, fails, status):
    trainer = tmp_path / "trainer"
    trainer.write_text(TRAINER.replace("{fails}", fails))
    trainer.chmod(0o755)
    process = subprocess.Popen(
        [ROOT / "launch" / "local.sh", "--", "--config=c"],
        env=os.environ | {"PYTHON": str(trainer)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        if fails == "true":
            for _ in range(2):
                assert process.stdout.readline() == "started\n"
            process.terminate()
        assert process.wait(10) == status


@pytest.mark.slow
def test_local_trains_with_two_processes(tmp_path, data_dir):
    result = launch(
        "local.sh",
        "--processes=2",
        "--cpu_devices=2",
        f"--port={fork_main.free_port()}",
        "--",
        "--config=configs/vit_t_digits.py",
        "--config.model.width=16",
        "--config.model.depth=2",
        "--config.model.patch_size=2",
        "--config.attention_init.name=default",
        "--config.log_every_steps=1",
        "--config.num_steps=3",
        f"--config.data.data_dir={data_dir}",
        f"--workdir={tmp_path / 'run'}",
        PYTHON=sys.executable,
        **fork_main.ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr
    assert "devices: 4 × cpu (2 hosts)" in result.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 3]
