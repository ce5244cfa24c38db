"""Trains or evaluates the model that a config file describes.

    python -m structinit_jax.main --config=configs/vit_t_digits.py --workdir=/tmp/digits

--mode=eval evaluates the newest checkpoint. --step=best selects the one with the highest accuracy
on config.data.eval_split. To avoid choosing it by the test images, train with a validation split,
such as --config.data.train_split=train[:90%] --config.data.eval_split=train[90%:], and evaluate
with --mode=eval --step=best --config.data.eval_split=test.

Any field of the config can be set on the command line: --config.batch_size=256
--config.model.depth=6 --config.attention_init.name=mimetic
"""

import contextlib
import io
import signal

from absl import flags

from structinit_jax import command_line, dry_run, evaluate, train
from structinit_jax.command_line import STEP, WORKDIR
from structinit_jax.errors import InputError
from structinit_jax.training import distributed

MODE = flags.DEFINE_enum(
    "mode", "train", ["train", "eval"], "Train, or evaluate a checkpoint in --workdir."
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print sizes and costs without reading images or allocating weights."
)
TARGET = flags.DEFINE_string(
    "target", None, "With --dry_run: devices to compile for, such as tpu-v5e:4x8 or h100:2x8."
)
PROFILE_STEP = flags.DEFINE_integer(
    "profile_step", None, "First of four steps after the start to trace to profile/.", lower_bound=1
)
COORDINATOR_ADDRESS = flags.DEFINE_string(
    "coordinator_address", None, "Host and port of process 0, when several processes train."
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Number of processes that train together. Detected on known clusters."
)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Index of this process, counted from 0.")
JOIN_TIMEOUT = flags.DEFINE_integer(
    "join_timeout", 300, "Seconds to wait for the other processes to start.", lower_bound=1
)
LOST_TIMEOUT = flags.DEFINE_integer(
    "lost_timeout", 60, "Seconds after which processes end if one of them is lost.", lower_bound=1
)


def main(overrides: command_line.Overrides) -> None:
    """Trains, evaluates or does a dry run, as the flags say; `overrides` set config fields."""
    if TARGET.value and not DRY_RUN.value:
        raise InputError(f"--target={TARGET.value} needs --dry_run, which compiles for it")
    if MODE.value == "eval" and (DRY_RUN.value or PROFILE_STEP.value):
        raise InputError("--dry_run and --profile_step are about training: omit --mode=eval")
    if STEP.value and MODE.value != "eval":
        raise InputError(f"--step={STEP.value} is the checkpoint to evaluate: add --mode=eval")
    notes = io.StringIO()
    with contextlib.redirect_stdout(notes):
        config = command_line.read_config(overrides)
    processes = (COORDINATOR_ADDRESS.value, NUM_PROCESSES.value, PROCESS_ID.value)
    distributed.join(*processes, JOIN_TIMEOUT.value, LOST_TIMEOUT.value)
    print(notes.getvalue(), end="")  # once: by process 0
    if DRY_RUN.value:
        dry_run.dry_run(config, TARGET.value)
    elif not WORKDIR.value:
        raise InputError("--workdir is required: the output directory, such as /tmp/digits")
    elif MODE.value == "eval":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else noted for a training step
        evaluate.evaluate_checkpoint(config, WORKDIR.value, STEP.value or "newest")
    else:
        train.train(config, WORKDIR.value, PROFILE_STEP.value)


if __name__ == "__main__":
    command_line.run(main, shared=["config", "workdir", "step", "trust_workdir"])
