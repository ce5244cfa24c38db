"""Classifies image files with the model of a run."""

import os
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from structinit_jax import config as config_lib
from structinit_jax.augment import normalize
from structinit_jax.data.images import BadImageError
from structinit_jax.data.loader import HostLoader
from structinit_jax.data.source import Dataset
from structinit_jax.errors import InputError
from structinit_jax.evaluate import class_names, restore_model

BATCH_SIZE = 64


class Classifier:
    """The model of a checkpoint, for image files.

    Images are cropped, resized and normalized as in the run's evaluation.

    Args:
      workdir: Output directory of the run.
      step: 'newest', 'best' or a number.
      trust: Whether the run's config may name Python code to import.

    Attributes:
      config: Config of the run.
      class_names: Name of each class.

    Raises:
      InputError: There is no such checkpoint.
    """

    def __init__(self, workdir: str | Path, step: str | int = "newest", trust: bool = False):
        self.config = config = config_lib.load_run_config(workdir, trust)
        model, state = restore_model(config, workdir, jax.local_devices()[:1], step)
        self.class_names = class_names(workdir, state)
        self._mesh = model.mesh
        self._weights = state.params, state.model_state

        @jax.jit
        def logits(weights, images):
            images = normalize(images, tuple(config.data.mean), tuple(config.data.std))
            network = nnx.merge(model.graphdef, *weights)
            return network(images)[0]

        self._logits = logits

    def __call__(self, files: Iterable[str | os.PathLike]) -> Float[np.ndarray, "n classes"]:
        """Returns the logits of images.

        Raises:
          InputError: A file is missing or cannot be decoded, or `files` is a single path.
        """
        if isinstance(files, str | os.PathLike):
            raise InputError(f"files={os.fspath(files)!r} must be a list of paths: put it in [ ]")
        files = list(files)
        records = [{"image": os.fspath(file), "label": 0} for file in files]
        data = self.config.data
        names = self.class_names
        dataset = Dataset.from_records("files", {"files": records}, names, data.channels)
        sizes = data.image_size, data.crop_fraction
        loader = HostLoader(dataset.split("files"), self._mesh, *sizes, random_crop=None)
        size = 2 ** (len(files) - 1).bit_length()  # few sizes, since each has a program of its own
        batches = loader.eval_batches(batch_size=min(size, BATCH_SIZE))
        try:
            logits = [self._logits(self._weights, batch["image"]) for batch in batches]
        except BadImageError as error:  # Its own advice is for training.
            raise InputError(error.problem) from error
        return np.concatenate(jax.device_get(logits))[: len(files)]
