"""The launch scripts: the commands they would run, and real runs of the local parts."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ARGUMENTS = ["--config=configs/vit_t_digits.py", "--workdir=/shared/a run", "--config.seed=1"]
SLICE = ["--name=slice", "--zone=us-west4-a"]


def launch(script, *arguments, **environment):
    command = [ROOT / "launch" / script, *arguments]
    environment = os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def planned(script, *arguments):
    """The commands that a dry run prints, as lists of words."""
    result = launch(script, *arguments, "--dry_run", "--", *ARGUMENTS)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("+ ")]
    return [shlex.split(line[2:]) for line in lines]


def programs(folder, **texts):
    """Writes stand-ins for programs; returns the PATH that finds them first."""
    for name, text in texts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_local_starts_one_process_per_gpu_or_on_virtual_devices():
    for i, words in enumerate(planned("local.sh", "--processes=3")):
        assert words[:2] == ["env", f"CUDA_VISIBLE_DEVICES={i}"]
        assert words[3:8] == ["-m", "structinit_jax.main", *ARGUMENTS]
        assert {"--num_processes=3", f"--process_id={i}"} <= set(words[8:])
    words = planned("local.sh", "--cpu_devices=4")[1]
    assert any("--xla_force_host_platform_device_count=4" in word for word in words)


@pytest.mark.parametrize(("fails", "status"), [("true", 75), ("false", 3)])
def test_local_ends_all_processes_together(tmp_path, fails, status):
    trainer = f"""trap 'exit 75' TERM
[[ $* != *--process_id=1* ]] || {fails} || exit 3
echo started
while true; do sleep 0.05; done"""
    programs(tmp_path, trainer=trainer)
    command = [ROOT / "launch" / "local.sh", "--port=8579", "--", "--config=c"]
    environment = os.environ | {"PYTHON": str(tmp_path / "trainer")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        if status == 75:
            assert [process.stdout.readline() for _ in range(2)] == ["started\n"] * 2
            process.terminate()
        assert process.wait(10) == status


def test_slurm_submits_one_task_per_gpu_and_passes_options_on():
    given = ["--time=1:00:00", "--qos=high", "--constraint=a100", "--reservation=r", "--exclusive"]
    (words,) = planned("slurm.sh", "--nodes=2", "--gpus=h100:4", *given)
    expected = {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=h100:4", *given}
    assert expected <= set(words[: words.index("launch/slurm.sbatch")])
    assert words[-4:] == ["launch/slurm.sbatch", *ARGUMENTS]
    (words,) = planned("slurm.sh", "--gpus=4", "--gres=gpu:4")
    assert not [word for word in words if word.startswith("--gpus-per-node")]


@pytest.mark.parametrize("status", [0, 2, 75])
def test_a_slurm_job_requeues_itself_only_if_it_was_stopped(tmp_path, status):
    (words,) = planned("slurm.sh", "--container=image", "--mounts=/shared:/shared")
    job = words[words.index("launch/slurm.sbatch") + 1 :]
    path = programs(
        tmp_path,
        srun=f'echo "$@" > {tmp_path / "run"}; exit {status}',
        scontrol=f'echo "$@" > {tmp_path / "requeued"}',
    )
    result = launch("slurm.sbatch", *job, **path, SLURM_JOB_ID="42", SLURM_CPUS_PER_TASK="8")
    assert result.returncode == status
    options = (tmp_path / "run").read_text().partition(" -m structinit_jax.main ")[0].split()
    assert {"--cpus-per-task=8", "--container-image=image"} <= set(options)
    assert f"--container-mounts={ROOT}:{ROOT},/shared:/shared" in options
    assert (tmp_path / "requeued").exists() == (status == 75)


def test_tpu_runs_on_all_workers_at_once():
    given = ["--type=v6e-16", "--spot", "--network=n", "--subnetwork=s", "--service-account=a"]
    (create,) = planned("tpu_pod.sh", "create", *SLICE, *given)
    expected = {"--accelerator-type=v6e-16", "--runtime-version=v2-alpha-tpuv6e", *given[1:]}
    assert expected <= set(create)
    copy, *remote = planned("tpu_pod.sh", "install", *SLICE)
    assert copy[:2] == ["git", "archive"]
    assert all("--worker=all" in words for words in remote)
    (run,) = planned("tpu_pod.sh", "run", *SLICE)
    assert shlex.split(run[-1].removeprefix("--command="))[-3:] == ARGUMENTS


def test_a_tpu_worker_installs_and_shows_how_a_run_starts(tmp_path):
    """The worker is a folder on this machine; its Python is a stand-in."""
    worker = tmp_path / "worker"
    worker.mkdir()
    gcloud = """cd "$WORKER" && export HOME=$WORKER
for last; do :; done
case "$*" in
  *" scp "*) cp "$5" . ;;
  *" ssh "*) exec bash -c "${last#--command=}" ;;
esac"""
    python = (
        'if [[ $* == *--flag* ]]; then echo "error: --flag"; exit 2; fi; echo devices: 4; sleep 2'
    )
    uv = f"""[[ $1 != venv ]] || {{ mkdir -p ~/venv/bin && cp {tmp_path / "python"} ~/venv/bin; }}
echo "uv $*"; exit "$UV_STATUS" """
    path = programs(tmp_path, gcloud=gcloud, uv=uv, python=python) | {"WORKER": str(worker)}
    assert "run install" in launch("tpu_pod.sh", "run", *SLICE, "--", "x", **path).stderr
    failed = launch("tpu_pod.sh", "install", *SLICE, **path, UV_STATUS="2")
    assert failed.returncode == 2
    assert "error: install failed on" in failed.stderr
    assert launch("tpu_pod.sh", "install", *SLICE, **path, UV_STATUS="0").returncode == 0
    assert "uv venv --clear --python 3.13" in (worker / "install.log").read_text()
    wrong = launch("tpu_pod.sh", "run", *SLICE, "--", "--flag", **path)
    assert (wrong.returncode, wrong.stdout) == (2, "error: --flag\n")
    right = launch("tpu_pod.sh", "run", *SLICE, "--", "--config=c", **path)
    assert (right.returncode, right.stdout) == (0, "devices: 4\n")
    again = launch("tpu_pod.sh", "run", *SLICE, "--", "--config=c", **path)
    assert "in progress" in again.stdout


def test_tpu_create_shows_the_errors_of_gcloud(tmp_path):
    gcloud = f"""if [[ ! -e {tmp_path}/once ]]; then touch {tmp_path}/once; echo CREATING
elif [[ ! -e {tmp_path}/twice ]]; then touch {tmp_path}/twice; echo "no permission" >&2; exit 1
else echo "FAILED no capacity"; fi"""
    path = programs(tmp_path, gcloud=gcloud)
    result = launch("tpu_pod.sh", "create", *SLICE, **path, POLL_SECONDS="0")
    assert "no permission" in result.stderr
    assert "FAILED no capacity" in result.stderr


def jobset(*options):
    result = launch("gke/gke.sh", "--image=x", *options, "--dry_run", "--", *ARGUMENTS)
    assert result.stdout.startswith("+ kubectl apply --filename=-")
    manifest = yaml.safe_load(result.stdout.split("\n", 1)[1])
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    return manifest["spec"], job, pod, pod["containers"][0]


@pytest.mark.parametrize(
    ("slice_", "accelerator", "nodes", "chips"),
    [
        ("v5e:4x4", "tpu-v5-lite-podslice", 4, 4),
        ("v5e:2x4", "tpu-v5-lite-podslice", 1, 8),
        ("v4:2x2x2", "tpu-v4-podslice", 2, 4),
    ],
)
def test_gke_starts_one_pod_per_host_of_a_slice(slice_, accelerator, nodes, chips):
    _, job, pod, container = jobset(f"--tpu={slice_}")
    assert job["completions"] == nodes
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert container["args"] == ARGUMENTS
    assert container["resources"]["limits"] == {"google.com/tpu": chips}


def test_gke_joins_gpu_nodes_and_retries_what_is_no_mistake():
    spec, job, pod, container = jobset("--nodes=4", "--claim=disk", "--spot")
    assert "--num_processes=4" in container["command"][2]
    assert '"$@" --coordinator_address=structinit-jax-workers-0-0.' in container["command"][2]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert environment["JAX_PLATFORMS"] == "cuda,cpu"
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}
    actions = {r["onExitCodes"]["values"][0]: r["action"] for r in job["podFailurePolicy"]["rules"]}
    assert actions == {75: "Ignore", 2: "FailJob"}
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_skypilot_joins_the_nodes():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    script = task["run"].replace("exec ~/venv/bin/python", "echo")
    nodes = dict(SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NUM_NODES="2")
    nodes |= dict(SKYPILOT_NODE_RANK="1", WORKDIR="s3://b/r", ARGUMENTS="--config=c")
    run = subprocess.run(
        ["bash", "-c", script], env=os.environ | nodes, capture_output=True, text=True
    )
    joined = "--coordinator_address=10.0.0.1:8476 --num_processes=2 --process_id=1"
    assert run.stdout == f"-m structinit_jax.main --config=c --workdir=s3://b/r {joined}\n"


@pytest.mark.parametrize(
    ("script", "arguments", "word"),
    [
        ("local.sh", [], "structinit_jax.main after --"),
        ("local.sh", ["--processes=none", "--", "x"], "--processes=none"),
        ("slurm.sh", ["--config=x"], "--config=x"),
        ("slurm.sh", ["--gpus=many", "--", "x"], "--gpus=many"),
        ("tpu_pod.sh", ["run", "--name=x"], "--zone=ZONE"),
        ("tpu_pod.sh", ["start", *SLICE, "--dry_run"], "'start'"),
        ("gke/gke.sh", ["--dry_run", "--", "x"], "--image=IMAGE"),
        ("gke/gke.sh", ["--tpu=v5e", "--image=x", "--dry_run", "--", "x"], "--tpu=v5e must be v4"),
    ],
)
def test_mistakes_end_with_a_message_that_names_them(script, arguments, word):
    result = launch(script, *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert word in result.stderr
