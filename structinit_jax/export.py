"""Exports the weights of a run as a safetensors file with timm's names and layout.

    python -m structinit_jax.export --workdir=DIR --out=model

Exports the newest checkpoint of a ViT or Swin, or the one that --step=best or --step=N selects.
Writes `model.safetensors` and `config.json` to the --out folder, so that
`timm.create_model("local-dir:model", pretrained=True)` builds the model in PyTorch, with its
normalization and class names. To start a new run from the weights, pass
`--config.start_from=model/model.safetensors`.

`class_map.pkl`, a dict from class name to label, is for timm's `--class-map`. timm's scripts need
it for image folders, because timm orders their classes differently: 2 before 10, ignoring case.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict
from safetensors.numpy import save

from structinit_jax import command_line
from structinit_jax import config as config_lib
from structinit_jax.command_line import FLAGS
from structinit_jax.errors import require
from structinit_jax.files import write_atomically
from structinit_jax.models.timm import to_timm
from structinit_jax.training.evaluation import restore_model

WEIGHTS = "model.safetensors"  # the name that timm expects in a folder
CLASS_MAP = "class_map.pkl"  # timm's text format cannot hold every folder name


def timm_card(config: ConfigDict) -> dict[str, Any]:
    """Returns the content of timm's `config.json` for a folder, except the class names.

    It has the name of timm's model and its keyword arguments. Raises `InputError` if timm cannot
    build the model from a folder.
    """
    data = config.data
    model = config.model
    needs = "'vit' or 'swin'; for the weights of other models, call si.to_timm(model) in Python"
    require("config.model.name", model.name, needs, model.name in ("vit", "swin"))
    arguments = dict(
        in_chans=data.channels,
        num_classes=model.num_classes,
        img_size=data.image_size,
        patch_size=model.patch_size,
        embed_dim=model.width,
        mlp_ratio=model.mlp_ratio,
    )
    if model.name == "swin":
        name = "swin_tiny_patch4_window7_224"
        arguments["depths"] = list(model.depths)
        arguments["num_heads"] = list(model.num_heads)
        arguments["window_size"] = model.window_size
    else:
        rope = model.positions == "rope"
        by_token = model.pool == "class_token"
        name = "vit_small_patch16_rope_224" if rope else "vit_base_patch16_224"
        arguments["depth"] = model.depth
        arguments["num_heads"] = model.num_heads
        arguments["class_token"] = by_token
        arguments["global_pool"] = "token" if by_token else "avg"
        if rope or model.layer_scale:  # timm's default: a scale only with rotary positions
            arguments["init_values"] = model.layer_scale or None
    return {
        "architecture": name,
        "num_classes": model.num_classes,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [data.channels, data.image_size, data.image_size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": data.crop_fraction,
            "mean": list(data.mean),
            "std": list(data.std),
            "num_classes": model.num_classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head.fc" if model.name == "swin" else "head",
        },
    }


def export(config: ConfigDict, workdir: str | Path, folder: Path, step: str = "newest") -> int:
    """Writes a checkpoint's weights, timm's `config.json` and its class map to an existing folder.

    Needs no data. Returns the step of the checkpoint. Raises `InputError` if there is no such
    checkpoint, or if timm cannot build its model from a folder.
    """
    config_lib.validate(config)
    card = timm_card(config)
    is_run = (folder / "checkpoints").exists()
    require("folder", str(folder), "a folder other than the workdir of a run", not is_run)
    model, state, names = restore_model(config, workdir, jax.local_devices()[:1], step)
    weights = to_timm(nnx.merge(model.graphdef, *jax.device_get(state.weights)))
    card["label_names"] = names
    labels = {name: label for label, name in enumerate(names)}
    text = json.dumps(card, indent=2)
    write_atomically(folder / "config.json", f"{text}\n")
    write_atomically(folder / CLASS_MAP, pickle.dumps(labels))
    # `save_file` would write a file that only its owner can read. "format" tells readers of
    # safetensors that the layout is PyTorch's.
    write_atomically(folder / WEIGHTS, save(weights, {"format": "pt", "config": text}))
    return int(state.step)


def main(overrides: command_line.Overrides) -> None:
    """Runs the command."""
    config = command_line.read_config(overrides)
    workdir = command_line.required_workdir()
    folder = command_line.out_folder("model")
    step = export(config, workdir, folder, FLAGS.step or "newest")
    print(f"wrote the weights of step {step} to {folder}")
    print(f'PyTorch: timm.create_model("local-dir:{folder}", pretrained=True)')
    print(f"timm's scripts, on image folders: --class-map {folder / CLASS_MAP}")


if __name__ == "__main__":
    command_line.run(main)
