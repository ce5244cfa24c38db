"""Classifies image files with the model of a run."""

import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from structinit_jax.augment import normalize
from structinit_jax.config import load_run_config
from structinit_jax.data.datasets import Dataset
from structinit_jax.data.images import BadImageError
from structinit_jax.data.loader import HostLoader
from structinit_jax.errors import InputError
from structinit_jax.evaluate import restore_model
from structinit_jax.training.checkpoint import read_run
from structinit_jax.training.workdir import open_path

BATCH_SIZE = 64


class Classifier:
    """The model of a checkpoint, for image files.

    Images are cropped, resized and normalized as in the run's evaluation. Averaged weights are used
    if the run has them.

    Args:
      workdir: Output directory of the run.
      step: 'best', 'newest' or a number; see `training.checkpoint.find_step`.
      trust: Whether to import the module of a model that the run's config names.

    Attributes:
      config: Config of the run.
      class_names: Name of each class.

    Raises:
      InputError: There is no such checkpoint.
    """

    def __init__(self, workdir: str | Path, step: str = "best", trust: bool = False):
        self.config = config = load_run_config(workdir, trust, uses=["model.name"])
        model, state = restore_model(config, workdir, jax.local_devices()[:1], step)
        run = read_run(open_path(workdir) / "checkpoints", int(state.step))
        self.class_names: list[str] = run["class_names"]
        self._mesh = model.mesh
        self._weights = state.ema or {"params": state.params, "model_state": state.model_state}

        @jax.jit
        def logits(weights, images):
            images = normalize(images, tuple(config.data.mean), tuple(config.data.std))
            network = nnx.merge(model.graphdef, weights["params"], weights["model_state"])
            return network(images)[0]

        self._logits = logits

    def __call__(self, files: Sequence[str | os.PathLike]) -> Float[np.ndarray, "n classes"]:
        """Returns the logits of images.

        Raises:
          InputError: A file is missing or cannot be decoded, or `files` is a single path.
        """
        if isinstance(files, str | os.PathLike):
            raise InputError(f"files={os.fspath(files)!r} must be a list of paths: put it in [ ]")
        if not files:
            raise InputError("files is empty: pass the paths of one or more images")
        records = [{"image": os.fspath(file), "label": 0} for file in files]
        shape, data = (None, None, self.config.data.channels), self.config.data
        dataset = Dataset.from_records("files", {"files": records}, self.class_names, shape)
        sizes = data.image_size, data.crop_fraction
        loader = HostLoader(dataset.split("files"), self._mesh, *sizes, random_crop=None)
        batches = loader.eval_batches(batch_size=min(len(files), BATCH_SIZE))
        try:
            logits = [self._logits(self._weights, batch["image"]) for batch in batches]
        except BadImageError as error:  # its advice is for training
            raise InputError(f"{error.problem}.") from error
        return np.concatenate(jax.device_get(logits))[: len(files)]
