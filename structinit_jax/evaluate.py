"""Evaluation: the data for it, a model from a checkpoint, exact results."""

from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax import resume
from structinit_jax.data import datasets
from structinit_jax.data.info import check_examples
from structinit_jax.data.loader import Loader, make_loader
from structinit_jax.data.test_sets import EvaluationSet, open_test_set
from structinit_jax.errors import InputError
from structinit_jax.program import MAX_IN_FLIGHT, Program, build_program, make_plan
from structinit_jax.training import checkpoint, files
from structinit_jax.training.state import TrainState


def evaluate(
    config: ConfigDict, program: Program, state: TrainState, loader: Loader
) -> dict[str, float]:
    """Exact loss and accuracy over all examples, whatever the split: 'test/loss', 'test/accuracy'.

    Where the state has averaged weights, 'test/ema_loss' and 'test/ema_accuracy' are theirs.
    """
    weights = {"test/": (state.params, state.model_state)}
    if state.ema:
        weights["test/ema_"] = (state.ema["params"], state.ema["model_state"])
    results = {}
    for prefix, model in weights.items():
        sums = []
        for batch in loader.eval_batches(batch_size=config.batch_size):
            sums.append(program.eval_step(*model, batch))
            jax.block_until_ready(sums[-MAX_IN_FLIGHT - 1 : -MAX_IN_FLIGHT])
        totals = jax.tree.map(lambda *leaves: float(np.sum(leaves)), *jax.device_get(sums))
        results[f"{prefix}loss"] = totals["loss"] / totals["count"]
        results[f"{prefix}accuracy"] = totals["correct"] / totals["count"]
    return results


def open_data(config: ConfigDict) -> datasets.Dataset:
    """Opens the config's data set and checks that the model fits it."""
    data = config.data
    dataset = datasets.open_dataset(data.name, data.data_dir or None, data.manual_dir or None)
    check_examples(
        dataset.info,
        num_classes=config.model.num_classes,
        channels=data.channels,
    )
    return dataset


def open_evaluation_set(
    config: ConfigDict, dataset: datasets.Dataset | None = None
) -> EvaluationSet:
    """The config's test split of its own data set, or the test set of ImageNet that it names."""
    data = config.data
    if data.eval_name:  # its folder is TFDS's, where the training set's is an image folder
        root = None if data.name in datasets.FILE_SETS else data.data_dir or None
        evaluation_set = open_test_set(data.eval_name, root, data.on_bad_image)
        check_examples(
            evaluation_set.info, num_classes=config.model.num_classes, channels=data.channels
        )
        return evaluation_set
    dataset = dataset or open_data(config)
    source = dataset.split(data.eval_split, "data.eval_split", data.on_bad_image)
    return EvaluationSet(f"{data.name} {data.eval_split}", source, dataset.info)


def restore_newest(program: Program, workdir: str | Path) -> tuple[int, TrainState]:
    """The newest checkpoint's step and state.

    Raises:
      InputError: if there is no checkpoint, or it is of another architecture.
    """
    directory = files.local_path(workdir) / "checkpoints"
    if not directory.is_dir():
        raise InputError(f"--workdir={workdir} holds no checkpoints: train there first")
    restored = checkpoint.restore_newest(directory, program.abstract_state)
    if restored is None:
        raise InputError(f"--workdir={workdir} holds no whole checkpoint: train there first")
    return restored


def make_eval_loader(config: ConfigDict, program: Program, evaluation_set: EvaluationSet) -> Loader:
    """The test images at the model's size, on their way to the devices."""
    size, crop = config.data.image_size, config.data.crop_fraction
    return make_loader(
        evaluation_set.source,
        evaluation_set.info,
        program.mesh,
        image_size=size,
        crop_fraction=crop,
    )


def evaluate_checkpoint(config: ConfigDict, workdir: str | Path) -> dict[str, float]:
    """Restores the newest checkpoint of a workdir, evaluates it and prints the result.

    Raises:
      InputError: if there is no checkpoint, or it is of another architecture.
    """
    config_lib.validate(config)
    evaluation_set = open_evaluation_set(config)
    plan = make_plan(config, evaluation_set.info, len(evaluation_set.source))
    program = build_program(config, plan, evaluation_set)
    step, state = restore_newest(program, workdir)
    run = checkpoint.read_run(files.local_path(workdir) / "checkpoints", step)
    if changed := resume.differences_in_evaluation(run, config):
        print("\n".join(["note: the checkpoint was trained with another config:", *changed]))
    results = evaluate(config, program, state, make_eval_loader(config, program, evaluation_set))
    count = len(evaluation_set.source)
    print(f"step {step}  {describe(results)} on {count:,} examples of {evaluation_set.name}")
    return results


def describe(results: dict[str, float]) -> str:
    """Such as 'test loss 0.0613  test accuracy 0.9833'."""
    return "  ".join(
        f"{name.replace('/', ' ').replace('_', ' ')} {value:.4f}" for name, value in results.items()
    )
