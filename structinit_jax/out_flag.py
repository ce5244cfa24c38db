"""The --out flag of the commands that draw."""

from absl import flags

OUT = flags.DEFINE_string("out", None, "The picture to write.")
