"""Writes a run's weights as a safetensors file, in timm's names and layout.

    python -m structinit_jax.export --config=FILE --workdir=DIR --out=model.safetensors

timm loads it: `model.load_state_dict(safetensors.torch.load_file("model.safetensors"))`; and a run
starts from it with `--config.start_from=model.safetensors`.
"""

from pathlib import Path

import jax
from absl import flags
from flax import nnx
from ml_collections import ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import save_file

from structinit_jax import command_line, evaluate
from structinit_jax import config as config_lib
from structinit_jax.command_line import OUT, WORKDIR
from structinit_jax.data.datasets import find_info
from structinit_jax.errors import InputError
from structinit_jax.interop import to_timm
from structinit_jax.program import build_program, make_plan

_AVERAGED = flags.DEFINE_bool("averaged", False, "Take the averaged weights of config.ema_decay.")


def export(config: ConfigDict, workdir: str | Path, path: Path, averaged: bool = False) -> int:
    """Writes the newest checkpoint's weights, for which no data is needed.

    Args:
      config: the run's.
      workdir: its folder.
      path: the file to write.
      averaged: whether to take the averaged weights.

    Returns:
      The checkpoint's step.

    Raises:
      InputError: if there is no such checkpoint or no averaged weights, or the file cannot be
        written.
    """
    config_lib.validate(config)
    if averaged and not config.ema_decay:
        raise InputError("--averaged needs a run with averaged weights: config.ema_decay is 0")
    info = find_info(config.data.name, config.data.data_dir or None)
    # The steps of the plan play no part in what is restored.
    program = build_program(config, make_plan(config, info, config.batch_size))
    step, state = evaluate.restore_newest(program, workdir)
    params, model_state = state.params, state.model_state
    if averaged:
        params, model_state = state.ema["params"], state.ema["model_state"]
    weights = to_timm(nnx.merge(program.graphdef, *jax.device_get((params, model_state))))
    try:
        save_file(weights, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"--out={path} cannot be written: {error}") from error
    return step


def main(config: ConfigDict) -> None:
    """Exports what the flags ask for."""
    if WORKDIR.value is None:
        raise InputError("--workdir is required: the folder of the run")
    path = Path(OUT.value or "model.safetensors")
    step = export(config, WORKDIR.value, path, _AVERAGED.value)
    print(f"wrote the weights of step {step} to {path}")


if __name__ == "__main__":
    command_line.run(main)
