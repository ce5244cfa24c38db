"""The --workdir flag of the commands that read a run's newest checkpoint."""

from absl import flags

WORKDIR = flags.DEFINE_string("workdir", None, "The run whose newest checkpoint is taken.")
