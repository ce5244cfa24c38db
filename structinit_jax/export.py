"""Exports the weights of a run as a safetensors file with timm's names and layout.

    python -m structinit_jax.export --workdir=DIR --out=model

Exports the newest checkpoint, or that of --step=best or --step=N. Writes `model.safetensors` to the
folder --out and prints the call that builds the model in PyTorch. With ViT and Swin, the folder
also gets a `config.json`, so that `timm.create_model("local-dir:model", pretrained=True)` builds
the model with its normalization and class names. If --out ends in .safetensors, writes only that
file, with the same information in its metadata. To start a new run from it, pass
`--config.start_from=model/model.safetensors`.
"""

# isort: split
import json
from pathlib import Path

import jax
from absl import flags
from flax import nnx
from ml_collections import ConfigDict
from safetensors.numpy import save

from structinit_jax import command_line
from structinit_jax import config as config_lib
from structinit_jax.command_line import STEP, WORKDIR
from structinit_jax.errors import InputError
from structinit_jax.evaluate import restore_model
from structinit_jax.interop import to_timm
from structinit_jax.interop.convert import TimmModel, timm_model
from structinit_jax.training.checkpoint import read_run
from structinit_jax.training.workdir import open_path, write_atomically

WEIGHTS = Path("model.safetensors")  # as timm expects it in a folder
_AVERAGED = flags.DEFINE_bool(
    "averaged", False, "Export the averaged weights of a run with config.ema_decay."
)


def export(
    config: ConfigDict,
    workdir: str | Path,
    path: Path,
    averaged: bool = False,
    step: str = "newest",
) -> tuple[int, TimmModel]:
    """Exports the weights of a checkpoint. Needs no data.

    Args:
      config: Config of the run.
      workdir: Its output directory.
      path: Folder for the weights and timm's `config.json`, or a `.safetensors` file.
      averaged: Whether to export the averaged weights.
      step: 'newest', 'best' or a number; see `checkpoint.find_step`.

    Returns:
      The step of the checkpoint, and timm's model of the weights.
    """
    config_lib.validate(config)
    if averaged and not config.ema_decay:
        raise InputError("--averaged needs a run with averaged weights, but config.ema_decay is 0")
    data, is_folder = config.data, path.suffix != WEIGHTS.suffix
    size = dict(image_size=data.image_size, channels=data.channels)
    timm = timm_model(config.model.to_dict(), **size)
    if is_folder and (path / "checkpoints").exists():
        raise InputError(f"--out={path} is the workdir of a run: choose another folder")
    model, state = restore_model(config, workdir, jax.local_devices()[:1], step)
    source = state.ema if averaged else state._asdict()
    weights = jax.device_get((source["params"], source["model_state"]))
    weights = to_timm(nnx.merge(model.graphdef, *weights))
    run = read_run(open_path(workdir) / "checkpoints", int(state.step))
    text = json.dumps(timm.card(data.to_dict(), run["class_names"]), indent=2)
    # "format" tells readers of safetensors that the layout is PyTorch's.
    metadata = {"format": "pt", "model": timm.call(), "config": text}
    try:
        if is_folder:
            path.mkdir(parents=True, exist_ok=True)
            if timm.is_registered:
                write_atomically(path / "config.json", f"{text}\n")
        # `save_file` would write a file that only its owner can read.
        write_atomically(path / WEIGHTS if is_folder else path, save(weights, metadata))
    except OSError as error:
        raise InputError(f"--out={path} cannot be written: {error}") from error
    return int(state.step), timm


def main(overrides: command_line.Overrides) -> None:
    """Runs the command."""
    config = command_line.read_config(overrides)
    if not WORKDIR.value:
        raise InputError("--workdir is required: the output directory of the run")
    path = command_line.out_path("model.safetensors")
    step, model = export(config, WORKDIR.value, path, _AVERAGED.value, STEP.value or "newest")
    print(f"wrote the weights of step {step} to {path}")
    if path.suffix != WEIGHTS.suffix and model.is_registered:
        print(f'PyTorch: timm.create_model("local-dir:{path}", pretrained=True), that is')
    print(f"PyTorch: {model.call()}")


if __name__ == "__main__":
    command_line.run(main)
