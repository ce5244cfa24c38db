import fcntl
import os
import shlex
import socket
import subprocess

import pytest
import yaml
from fork_main import ROOT

ARGUMENTS = ["--config=configs/vit_t_digits.py", "--workdir=/shared/Bob's run", "--config.seed=1"]
SLICE = ["--name=slice", "--zone=us-west4-a"]


def launch(script, *arguments, **environment):
    command = [ROOT / "launch" / script, *arguments]
    environment = os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def planned(script, *arguments, **environment):
    """The commands that a dry run prints, as lists of words."""
    result = launch(script, *arguments, "--dry_run", "--", *ARGUMENTS, **environment)
    assert result.returncode == 0, result.stderr
    return [shlex.split(line[2:]) for line in result.stdout.splitlines() if line[:2] == "+ "]


def programs(folder, **texts):
    """Writes stub programs and returns a PATH in which they come first."""
    for name, text in texts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("local.sh", ["--processes=0", "--", "--workdir=w"], "--processes=0 must"),
        ("local.sh", ["--processes=1"], "nothing to train"),
        ("local.sh", ["--port=", "--", "--workdir=w"], "--port needs a value"),
        ("slurm.sh", ["--config=x"], "unknown option --config"),
        ("slurm.sh", ["--nodes=1", "--", "--config=x"], "--workdir=DIR is required"),
        ("slurm.sh", ["--gpus=h100", "--", "--workdir=w"], "--gpus=h100 must"),
        ("slurm.sh", ["--mounts=/a:/a", "--", "--workdir=w"], "--mounts=/a:/a needs --container"),
        ("tpu_pod.sh", ["run", "--zone=z", "--", "--workdir=w"], "--name=NAME is required"),
        ("tpu_pod.sh", ["run", *SLICE], "nothing to train"),
        ("gke/gke.sh", ["--nodes=1", "--", "--workdir=w"], "--image=IMAGE is required"),
        ("gke/gke.sh", ["--image=x", "--tpu=v5e:4", "--", "--workdir=w"], "--tpu=v5e:4 must"),
    ],
)
def test_mistakes_are_named(script, arguments, message):
    first, *rest = arguments
    result = launch(script, first, "--dry_run", *rest)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {message}")


def test_local_starts_one_process_per_gpu():
    for i, words in enumerate(planned("local.sh", "--processes=3", CUDA_VISIBLE_DEVICES="")):
        assert words[:2] == ["env", f"CUDA_VISIBLE_DEVICES={i}"]
        assert words[4:8] == ["structinit_jax.main", *ARGUMENTS]
        assert {"--num_processes=3", f"--process_id={i}"} <= set(words[8:])
    given = dict(CUDA_VISIBLE_DEVICES="4,6")
    gpus = [words[1] for words in planned("local.sh", **given)]
    assert gpus == ["CUDA_VISIBLE_DEVICES=4", "CUDA_VISIBLE_DEVICES=6"]
    words, _ = planned("local.sh", "--cpu_devices=3", **given)
    assert words[1] == "JAX_PLATFORMS=cpu"
    assert words[2].endswith("device_count=3")
    result = launch("local.sh", "--processes=3", "--", "--workdir=w", **given)
    assert result.stderr.endswith("CUDA_VISIBLE_DEVICES=4,6 lists only 2\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = launch("local.sh", f"--port={port}", "--", "--workdir=w", PYTHON="false")
    assert result.stderr.startswith(f"error: --port={port} is in use")


@pytest.mark.parametrize(("fails", "status"), [("true", 75), ("false", 3)])
def test_local_ends_all_processes_together(tmp_path, fails, status):
    trainer = f"""id=${{*: -1}} id=${{id#*=}}
trap 'sleep 0.$id; touch {tmp_path}/saved_$id; exit 75' TERM
((id != 1)) || {fails} || exit 3
echo started
for _ in {{1..400}}; do sleep 0.05; done"""
    programs(tmp_path, trainer=trainer)
    command = [ROOT / "launch" / "local.sh", "--port=8579", "--", "--workdir=w"]
    environment = os.environ | {"PYTHON": str(tmp_path / "trainer")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        if status == 75:
            assert [process.stdout.readline() for _ in range(2)] == ["started\n"] * 2
            process.terminate()
        try:
            assert process.wait(10) == status
        finally:
            process.kill()
    assert len([*tmp_path.glob("saved_*")]) == (2 if status == 75 else 0)


def test_slurm_submits_one_task_per_gpu_and_passes_options_on():
    given = ["--time=1:00:00", "--qos=high", "--constraint=a100", "--reservation=r", "--exclusive"]
    (words,) = planned("slurm.sh", "--nodes=2", "--gpus=h100:4", "--cpus=6", "--name=a", *given)
    expected = {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=h100:4", *given}
    expected |= {"--cpus-per-task=6", "--job-name=a"}
    assert expected <= set(words[: words.index("launch/slurm.sbatch")])
    assert words[-3:] == ARGUMENTS
    (words,) = planned("slurm.sh", "--gres=gpu:h100:4")
    assert not [word for word in words if word.startswith("--gpus-per-node")]


@pytest.mark.parametrize("status", [2, 75])
def test_a_slurm_job_requeues_itself_only_if_it_was_stopped(tmp_path, status):
    (words,) = planned("slurm.sh", "--container=image", "--mounts=/shared:/shared")
    job = words[words.index("launch/slurm.sbatch") + 1 :]
    srun = f'echo "$@" > {tmp_path / "run"}; exit {status}'
    path = programs(tmp_path, srun=srun, scontrol=f"touch {tmp_path / 'requeued'}")
    result = launch("slurm.sbatch", *job, **path, SLURM_JOB_ID="42", SLURM_CPUS_PER_TASK="8")
    assert result.returncode == status
    options = (tmp_path / "run").read_text().partition(" -m structinit_jax.main ")[0].split()
    mounts = f"--container-mounts={ROOT}:{ROOT},/shared:/shared"
    expected = {"--cpus-per-task=8", "--kill-on-bad-exit=0", "--container-image=image", mounts}
    assert expected <= set(options)
    assert (tmp_path / "requeued").exists() == (status == 75)


def test_tpu_runs_on_all_workers_at_once():
    given = ["--reserved", "--network=n", "--subnetwork=s", "--service-account=a", "--project=p"]
    (create,) = planned("tpu_pod.sh", "create", *SLICE, "--type=v6e-16", *given)
    expected = {"--accelerator-type=v6e-16", "--runtime-version=v2-alpha-tpuv6e", *given}
    assert expected <= set(create)
    (run,) = planned("tpu_pod.sh", "run", *SLICE)
    assert "--worker=all" in run
    assert shlex.split(run[-1].removeprefix("--command="))[-3:] == ARGUMENTS
    *_, install = planned("tpu_pod.sh", "install", *SLICE, "--bucket=gs://b")
    assert install[-1].endswith("tpu_install.sh b")
    (stop,) = planned("tpu_pod.sh", "stop", *SLICE)
    assert "--worker=all" in stop


def test_a_slice_that_cannot_be_had_is_not_waited_for(tmp_path):
    path = programs(tmp_path, gcloud="echo FAILED no quota")
    result = launch("tpu_pod.sh", "create", *SLICE, **path)
    assert (result.returncode, result.stderr[:34]) == (1, "error: the slice is FAILED no quot")


def test_a_tpu_worker_has_one_run_whose_mistake_is_shown(tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    programs(tmp_path / "venv" / "bin", python="seq 99; echo error: a mistake; exit 2")
    result = launch("tpu_run.sh", "--config=c", HOME=str(tmp_path))
    shown = [*map(str, range(71, 100)), "error: a mistake"]  # the last 30 lines
    assert (result.returncode, result.stdout.splitlines()) == (2, shown)
    with (tmp_path / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = launch("tpu_run.sh", "--config=c", HOME=str(tmp_path))
        *_, install = planned("tpu_pod.sh", "install", *SLICE)
        programs(tmp_path, install=install[-1].removeprefix("--command="))
        refused = launch(tmp_path / "install", HOME=str(tmp_path))
    assert (result.returncode, result.stdout[:20]) == (0, "a run is in progress")
    assert (refused.returncode, refused.stderr[:13]) == (1, "error: in use")
    for script in ("tpu_run.sh", "tpu_install.sh"):
        result = launch(script, "--help", HOME="/nowhere")
        assert (result.returncode, result.stdout.count(script)) == (0, 1)


def test_a_tpu_worker_mounts_the_bucket_that_was_named_last(tmp_path):
    log = f'echo $(basename "$0") "$@" >> {tmp_path}/log'
    mounted = f"grep -q gcsfuse {tmp_path}/log"
    path = programs(tmp_path, uv="", gcsfuse=log, fusermount=log, mountpoint=mounted)
    for bucket in ("old", "new"):
        assert launch("tpu_install.sh", bucket, HOME=str(tmp_path), **path).returncode == 0
    mounts = [f"gcsfuse --implicit-dirs {name} {tmp_path}/bucket" for name in ("old", "new")]
    unmount = f"fusermount -u {tmp_path}/bucket"
    assert (tmp_path / "log").read_text().splitlines() == [mounts[0], unmount, mounts[1]]


def jobset(*options):
    result = launch("gke/gke.sh", "--image=x", *options, "--dry_run", "--", *ARGUMENTS)
    spec = yaml.safe_load(result.stdout.split("\n", 1)[1])["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    return spec, job, pod, pod["containers"][0]


@pytest.mark.parametrize(
    ("slice_", "nodes", "chips"), [("v5e:4x4", 4, 4), ("v5e:2x4", 1, 8), ("v4:2x2x2", 2, 4)]
)
def test_gke_starts_one_pod_per_host_of_a_slice(slice_, nodes, chips):
    _, job, _, container = jobset(f"--tpu={slice_}")
    assert (job["completions"], container["args"]) == (nodes, ARGUMENTS)
    assert container["resources"]["limits"] == {"google.com/tpu": chips}


def started(command, **environment):
    """Runs a command whose programs print their arguments; returns these by process."""
    environment = os.environ | environment
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    words = [line.split() for line in result.stdout.splitlines()]
    return sorted(words, key=lambda words: int(words[-1].partition("=")[2]))


def test_gke_joins_gpu_nodes_and_retries_what_is_no_mistake():
    spec, job, pod, container = jobset("--nodes=4", "--claim=disk", "--spot")
    address = "--coordinator_address=structinit-jax-workers-0-0.structinit-jax:8476"
    last_pod = [*container["command"], *container["args"]]
    processes = started(last_pod, PYTHON="echo", JOB_COMPLETION_INDEX="3")
    assert len(processes) == 8
    for i, words in enumerate(processes):
        assert words[:4] == ["-m", "structinit_jax.main", "--join_timeout=86400", ARGUMENTS[0]]
        assert words[-3:] == [address, "--num_processes=32", f"--process_id={24 + i}"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert environment["JAX_PLATFORMS"] == "cuda,cpu"
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["onExitCodes"]["values"], rule["action"]) == ([2], "FailJob")
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_skypilot_starts_one_process_per_gpu(tmp_path):
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    programs(tmp_path / "venv" / "bin", python='echo "$@"')
    variables = dict(HOME=str(tmp_path), WORKDIR="s3://b/run", ARGUMENTS="--config=c --x=1")
    nodes = dict(NUM_GPUS_PER_NODE="2", NUM_NODES="2", NODE_RANK="1", NODE_IPS="10.0.0.1\n10.0.0.2")
    variables |= {f"SKYPILOT_{name}": value for name, value in nodes.items()}
    flags = "--config.data.data_dir=/data --config=c --x=1 --workdir=s3://b/run"
    join = "--coordinator_address=10.0.0.1:8476 --num_processes=4 --process_id="
    processes = started(["bash", "-c", task["run"]], **variables)
    assert [" ".join(words[2:]) for words in processes] == [f"{flags} {join}{i}" for i in (2, 3)]
