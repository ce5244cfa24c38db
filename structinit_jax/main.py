"""Trains or evaluates the model that a config file describes.

    python -m structinit_jax.main --config=configs/vit_t_digits.py --workdir=/tmp/digits

--mode=eval evaluates the newest checkpoint, or with --step=best the one with the highest accuracy
on config.data.eval_split.

Any field of the config can be set on the command line: --config.batch_size=256
--config.model.depth=6 --config.attention_init.name=mimetic
"""

import signal

import jax
from absl import flags
from etils import epy

from structinit_jax import command_line
from structinit_jax.command_line import FLAGS
from structinit_jax.errors import InputError
from structinit_jax.files import open_path, write_atomically
from structinit_jax.training import distributed, evaluation
from structinit_jax.training.metrics import read_metrics
from structinit_jax.training.train import train

with epy.lazy_imports():  # most runs need no dry run, and need matplotlib only at evaluations
    from structinit_jax import dry_run, figures


def define_flags() -> None:
    """Defines the flags specific to this command."""
    flags.DEFINE_enum("mode", "train", ["train", "eval"], "Train, or evaluate a checkpoint.")
    text = "Print sizes and memory without reading images or computing initial weights."
    flags.DEFINE_bool("dry_run", False, text)
    text = "Devices to compile for in a dry run, such as tpu-v5e:4x8 or h100:2x8."
    flags.DEFINE_string("target", None, text)
    text = "First of four steps to trace to profile/, counted from the start or resume."
    flags.DEFINE_integer("profile_step", None, text, lower_bound=1)
    text = "Host and port of process 0, when several processes train."
    flags.DEFINE_string("coordinator_address", None, text)
    text = "Number of processes that train together. Detected on known clusters."
    flags.DEFINE_integer("num_processes", None, text)
    flags.DEFINE_integer("process_id", None, "Index of this process, counted from 0.")
    text = "Seconds to wait for the other processes to start."
    flags.DEFINE_integer("join_timeout", 300, text, lower_bound=1)


def write_curves(step: int, results: dict[str, float]) -> None:
    """Redraws curves.png from the metrics up to `step`."""
    if jax.process_index() == 0:
        workdir = open_path(FLAGS.workdir)
        lines = read_metrics(workdir / "metrics.jsonl", step)
        write_atomically(workdir / "curves.png", figures.png(figures.draw_curves(lines)))


def main(overrides: command_line.Overrides) -> None:
    """Trains, evaluates or does a dry run, as the flags say; `overrides` sets config fields."""
    evaluates = FLAGS.mode == "eval"
    for name in ("dry_run", "target", "profile_step") if evaluates else ("step", "out"):
        if FLAGS[name].value:
            raise InputError(f"--{name}={FLAGS[name].value} has no effect with --mode={FLAGS.mode}")
    processes = (FLAGS.coordinator_address, FLAGS.num_processes, FLAGS.process_id)
    distributed.join(*processes, FLAGS.join_timeout)
    config = command_line.read_config(overrides)
    if FLAGS.dry_run or FLAGS.target:
        dry_run.dry_run(config, FLAGS.target)
    elif evaluates:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # After `join`, JAX only records it.
        workdir = command_line.required_workdir()
        out = command_line.out_folder("") if FLAGS.out else None
        evaluation.evaluate_checkpoint(config, workdir, FLAGS.step or "newest", out)
    else:
        workdir = command_line.required_workdir()
        train(config, workdir, FLAGS.profile_step, on_evaluation=write_curves)


if __name__ == "__main__":
    command_line.run(main, define_flags)
