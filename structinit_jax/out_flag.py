"""The --out flag of the commands that write a file."""

from absl import flags

OUT = flags.DEFINE_string("out", None, "The file to write.")
