"""Trains several schemes, learning rates and seeds at once on one device.

    python benchmarks/sweep.py --config=configs/vit_cifar10_small.py --config.data.data_dir=DIR \
        --config.model.dtype=bfloat16 --scheme=default --scheme=impulse:target_mass=0.1 \
        --rates=0.5,1,2 --seeds=5 --out=sweep.json

A small model leaves a GPU almost idle. Here one program, the trainer's step under `jax.vmap`, does
a step of all runs. Each has the weights, batches and augmentation that `main` would give it with
its scheme, its seed and `config.learning_rate` times its rate. On an H200, 115 runs of this config
(938 steps) took 64 s once compiled. There are no checkpoints.
"""

import ast
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from structinit_jax import command_line
from structinit_jax.attention_init import SCHEMES, AttentionInit
from structinit_jax.data.loader import decode_all, stream_indices
from structinit_jax.errors import InputError, find
from structinit_jax.run import Run, augmentation, set_up
from structinit_jax.training.optimizer import LOSSES, make_optimizer
from structinit_jax.training.setup import Setup
from structinit_jax.training.state import (
    AbstractModel,
    TrainState,
    init_state,
    split_model,
    split_seed,
)
from structinit_jax.training.step import make_eval_step, make_train_step

SCHEME = flags.DEFINE_multi_string(
    "scheme", ["default", "mimetic", "impulse"], "NAME or NAME:OPTION=VALUE,OPTION=VALUE; repeated."
)
RATES = flags.DEFINE_list("rates", ["1"], "Factors on config.learning_rate.")
SEEDS = flags.DEFINE_integer("seeds", 5, "Number of seeds, from 0.", lower_bound=1)
EVAL_BATCH = 250
# Axes of a `TrainState` under vmap: all runs are at the same step, so that the runs of a seed share
# their augmentation.
STATE = TrainState(None, 0, 0, 0)


def read_scheme(text: str) -> AttentionInit:
    """Makes a scheme from a value of --scheme."""
    name, _, options = text.partition(":")
    pairs = (option.partition("=") for option in options.split(",") if option)
    options = {key: ast.literal_eval(value) for key, _, value in pairs}
    return find(name, SCHEMES, "scheme")(**options)


def draw_weights(model: AbstractModel, schemes: list[AttentionInit], seeds: np.ndarray) -> tuple:
    """Returns parameters and model state of all runs, with leading axes [seeds, schemes]."""

    def draw(scheme, seed):
        params_rng, attention_rng, _ = split_seed(seed)
        module = model.build(params_rng)
        module.initialize_attention(scheme, attention_rng)
        return split_model(module)[1:]

    drawn = [jax.jit(jax.vmap(functools.partial(draw, scheme)))(seeds) for scheme in schemes]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *drawn)


def make_step(config: ConfigDict, setup: Setup, factors: np.ndarray, seeds: np.ndarray) -> Callable:
    """Returns the step of all runs, `(state, images, labels, indices [seeds, B]) -> state`."""
    model, schedule = setup.model, setup.schedule
    augment, loss = augmentation(config, model.mesh), find(config.loss, LOSSES, "loss")

    def step_of_run(state, factor, seed, batch):
        def learning_rate(step):
            return factor * schedule.learning_rate(step)

        optimizer = make_optimizer(config.optimizer, learning_rate, dict(config))
        functions = (optimizer, learning_rate, augment, model.mesh)
        step = make_train_step(model.graphdef, *functions, loss=loss, seed=seed)
        return step(state, batch)[0]

    step_of_seed = jax.vmap(step_of_run, in_axes=(STATE, 0, None, None), out_axes=STATE)
    step_of_all = jax.vmap(step_of_seed, in_axes=(STATE, None, 0, 0), out_axes=STATE)

    def step(state, images, labels, indices):
        batch = {"image": images[indices], "label": labels[indices]}
        return step_of_all(state, factors, seeds, batch)

    return jax.jit(step, donate_argnums=0)


def make_evaluate(config: ConfigDict, model: AbstractModel) -> Callable:
    """Returns `(state, images, labels) -> accuracies [seeds, runs]`."""
    eval_step = make_eval_step(model.graphdef, model.mesh, config.data.mean, config.data.std)

    @jax.jit
    def count_correct(state, batch):
        def of_run(state):
            return eval_step(state.params, state.model_state, batch)["correct"]

        return jax.vmap(jax.vmap(of_run, in_axes=(STATE,)), in_axes=(STATE,))(state)

    def evaluate(state, images, labels):
        correct = 0
        for start in range(0, len(images), EVAL_BATCH):
            part = slice(start, start + EVAL_BATCH)
            batch = {"image": images[part], "label": labels[part]}
            correct += count_correct(state, batch | {"mask": np.ones(len(batch["label"]))})
        return np.asarray(correct) / len(images)

    return evaluate


def sweep(
    config: ConfigDict, schemes: list[AttentionInit], rates: list[float], num_seeds: int
) -> tuple[TrainState, dict[int, np.ndarray]]:
    """Trains all runs, and returns their states and their accuracies by step.

    Arrays have leading axes [seeds, runs]; runs are ordered by rate, then by scheme. Accuracies are
    on `config.data.eval_split`.
    """
    if config.augment.crop == "resized":
        raise InputError("config.augment.crop='resized' is not supported: set it to 'none'")
    run = Run(config)
    sources, data = (run.train_source, run.eval_source), config.data
    arrays = [decode_all(source, data.image_size, data.crop_fraction) for source in sources]
    train, test = jax.device_put(arrays, jax.devices()[0])
    setup = set_up(config, len(train[0]), devices=jax.devices()[:1])
    schedule, seeds = setup.schedule, np.arange(num_seeds, dtype=np.uint32)
    weights = draw_weights(setup.model, schemes, seeds)
    weights = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * len(rates), axis=1), weights)
    optimizer = make_optimizer(config.optimizer, schedule.learning_rate, dict(config))
    init = functools.partial(init_state, optimizer=optimizer)
    state = jax.jit(jax.vmap(jax.vmap(init, out_axes=STATE), out_axes=STATE))(*weights)
    step = make_step(config, setup, np.repeat(np.float32(rates), len(schemes)), seeds)
    evaluate, accuracies = make_evaluate(config, setup.model), {}
    for number in range(schedule.num_steps):
        stream = number * config.batch_size, (number + 1) * config.batch_size, len(train[0])
        indices = np.stack([stream_indices(int(seed), *stream, data.repeats) for seed in seeds])
        state = step(state, *train, indices.astype(np.int32))
        if number + 1 in schedule.eval_steps:
            accuracies[number + 1] = evaluate(state, *test)
    return state, accuracies


def main(overrides: command_line.Overrides) -> None:
    """Prints the accuracies of all runs and writes them as JSON."""
    config, rates = command_line.read_config(overrides), list(map(float, RATES.value))
    began = time.perf_counter()
    _, accuracies = sweep(config, list(map(read_scheme, SCHEME.value)), rates, SEEDS.value)
    labels = [f"{name}, rate × {rate:g}" for rate in rates for name in SCHEME.value]
    print(f"{SEEDS.value} runs each of {len(labels)}, {time.perf_counter() - began:.0f} s")
    results = {"config": json.loads(config.to_json()), "device": jax.devices()[0].device_kind}
    for step, values in accuracies.items():
        print(f"{config.data.eval_split} accuracy in % after step {step}")
        results[step] = dict(zip(labels, values.T.tolist(), strict=True))
        for label, by_seed in zip(labels, 100 * values.T, strict=True):
            print(f"  {label:40} {by_seed.mean():5.1f} ± {by_seed.std():.1f}", by_seed.round(2))
    Path(flags.FLAGS.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    command_line.run(main, shared=("config", "out"))
