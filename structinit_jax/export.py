"""Exports the weights of a run as a safetensors file with timm's names and layout.

    python -m structinit_jax.export --config=FILE --workdir=DIR --out=model.safetensors

The checkpoint is the newest one, or that of --step=best or --step=N.

timm loads it with `model.load_state_dict(safetensors.torch.load_file("model.safetensors"))`, and a
new run starts from it with `--config.start_from=model.safetensors`.
"""

from structinit_jax import trainer_extra  # noqa: F401 (first, before what may be missing)

# isort: split
from pathlib import Path

import jax
from absl import flags
from flax import nnx
from ml_collections import ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import save_file

from structinit_jax import command_line
from structinit_jax import config as config_lib
from structinit_jax.command_line import OUT, STEP, WORKDIR
from structinit_jax.errors import InputError
from structinit_jax.evaluate import restore_model
from structinit_jax.interop import to_timm

_AVERAGED = flags.DEFINE_bool(
    "averaged", False, "Export the averaged weights of a run with config.ema_decay."
)


def export(
    config: ConfigDict,
    workdir: str | Path,
    path: Path,
    averaged: bool = False,
    step: str = "newest",
) -> int:
    """Exports the weights of a checkpoint and returns its step. Needs no data.

    Args:
      config: Config of the run.
      workdir: Output directory of the run.
      path: File to write.
      averaged: Whether to export the averaged weights.
      step: 'newest', 'best' or a number; see `checkpoint.find_step`.

    Raises:
      InputError: There is no checkpoint or no averaged weights, or the file cannot be written.
    """
    config_lib.validate(config)
    if averaged and not config.ema_decay:
        raise InputError("--averaged needs a run with averaged weights, but config.ema_decay is 0")
    model, state = restore_model(config, workdir, jax.local_devices()[:1], step)
    source = state.ema if averaged else state._asdict()
    weights = jax.device_get((source["params"], source["model_state"]))
    weights = to_timm(nnx.merge(model.graphdef, *weights))
    try:
        save_file(weights, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"--out={path} cannot be written: {error}") from error
    return int(state.step)


def main(config: ConfigDict) -> None:
    """Runs the command."""
    if WORKDIR.value is None:
        raise InputError("--workdir is required: the output directory of the run")
    path = Path(OUT.value or "model.safetensors")
    step = export(config, WORKDIR.value, path, _AVERAGED.value, STEP.value or "newest")
    print(f"wrote the weights of step {step} to {path}")


if __name__ == "__main__":
    command_line.run(main)
