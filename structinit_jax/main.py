"""Trains or evaluates what a config file describes.

    python -m structinit_jax.main --config=configs/vit_t_digits.py --workdir=/tmp/digits

Any field of the config can be set on the command line: --config.batch_size=256
--config.model.depth=6 --config.attention_init.name=mimetic
"""

from absl import flags
from ml_collections import ConfigDict

from structinit_jax import command_line, dry_run, evaluate, train
from structinit_jax.errors import InputError
from structinit_jax.training import distributed, profiling

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for checkpoints, metrics and the resolved config; resumed from."
)
_MODE = flags.DEFINE_enum(
    "mode", "train", ["train", "eval"], "Train, or evaluate the newest checkpoint of --workdir."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Build everything abstractly and print sizes and costs; reads no data."
)
_PROFILE_STEPS = flags.DEFINE_string(
    "profile_steps", None, "First and last step to trace into --workdir/profile, such as 10:13."
)
_COORDINATOR_ADDRESS = flags.DEFINE_string(
    "coordinator_address", None, "With several processes: host:port of process 0."
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "How many processes train together; found out on clusters that tell."
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Which of them this one is, from 0 to num_processes - 1."
)
_JOIN_TIMEOUT = flags.DEFINE_integer(
    "join_timeout", 300, "Seconds to wait for the other processes to start.", lower_bound=1
)


def main(config: ConfigDict) -> None:
    """Runs the mode that the flags ask for."""
    distributed.join(
        _COORDINATOR_ADDRESS.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _JOIN_TIMEOUT.value
    )
    if _DRY_RUN.value:
        dry_run.dry_run(config)
    elif not _WORKDIR.value:
        raise InputError(
            "--workdir is required: the folder for checkpoints and metrics, such as "
            "--workdir=/tmp/digits (a run in it is resumed)"
        )
    elif _MODE.value == "eval":
        evaluate.evaluate_checkpoint(config, _WORKDIR.value)
    else:
        train.train(config, _WORKDIR.value, profiling.parse_steps(_PROFILE_STEPS.value))


if __name__ == "__main__":
    command_line.run(main)
