"""Trains several schemes, learning rates and seeds at once on one device.

    python benchmarks/sweep.py --config=configs/vit_cifar10_small.py --config.data.data_dir=DIR \
        --config.model.dtype=bfloat16 --scheme=default --scheme=impulse:target_mass=0.1 \
        --rates=0.5,1,2 --num_seeds=5 --out=sweep.json

A small model leaves a GPU almost idle. Here one program, the trainer's step under `jax.vmap`,
advances all runs at once. Each has the weights, batches and augmentation that `main` would give it
for its scheme and seed, if the config has the model fields that the scheme needs. A rate multiplies
the whole learning rate schedule. On an H200, 125 runs of this config (938 steps) took 64 s once
compiled. Only the accuracies are saved.
"""

import ast
import functools
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from structinit_jax import command_line
from structinit_jax import config as config_lib
from structinit_jax.attention_init import AttentionInit
from structinit_jax.config import make_attention_init
from structinit_jax.data.images import CenterCrop
from structinit_jax.data.loader import Loader, make_loader
from structinit_jax.errors import InputError
from structinit_jax.rngs import split_seed
from structinit_jax.training import build, sharding
from structinit_jax.training.evaluation import make_eval_step
from structinit_jax.training.optimizer import Schedule
from structinit_jax.training.state import AbstractModel, TrainState, split_model
from structinit_jax.training.step import make_train_step

SCHEME = flags.DEFINE_multi_string(
    "scheme", ["default", "mimetic", "impulse"], "NAME or NAME:OPTION=VALUE,OPTION=VALUE; repeated."
)
RATES = flags.DEFINE_list("rates", ["1"], "Factors on the learning rate.")
NUM_SEEDS = flags.DEFINE_integer("num_seeds", 5, "Number of seeds, from 0.", lower_bound=2)
EVAL_BATCH = 250
# Axes of a `TrainState` under vmap: all runs are at the same step, so that the runs of a seed share
# their augmentation.
STATE = TrainState(None, 0, 0, 0)


def read_scheme(text: str) -> AttentionInit:
    """Makes a scheme from a value of --scheme."""
    name, _, options = text.partition(":")
    try:
        call = ast.parse(f"f({options})", mode="eval").body
        if call.args:
            raise SyntaxError("an option without a value")
        options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise InputError(f"--scheme={text}: write NAME:OPTION=VALUE, strings in quotes") from error
    return make_attention_init(ConfigDict({"attention_init": {"name": name, **options}}))


def draw_weights(model: AbstractModel, schemes: list[AttentionInit], seeds: np.ndarray) -> tuple:
    """Returns parameters and model state of all runs, with leading axes [seeds, schemes]."""

    def draw(scheme, seed):
        params_rng, attention_rng, _ = split_seed(seed)
        network = model.create(params_rng)
        network.initialize_attention(scheme, attention_rng)
        return split_model(network)[1:]

    draws = [functools.partial(draw, scheme) for scheme in schemes]
    drawn = [jax.jit(jax.vmap(draw))(seeds) for draw in draws]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *drawn)


def make_step(
    config: ConfigDict,
    model: AbstractModel,
    schedule: Schedule,
    factors: np.ndarray,
    seeds: np.ndarray,
) -> Callable:
    """Returns the step for all runs, `(state, batches of the seeds) -> state`."""

    def step_of_run(state, factor, seed, batch):
        def learning_rate(step):
            return factor * schedule.learning_rate(step)

        optimizer = build.make_optimizer(config, learning_rate, model)
        step = make_train_step(config, model, optimizer, learning_rate)
        return step(state, batch, seed)[0]

    step_of_seed = jax.vmap(step_of_run, in_axes=(STATE, 0, None, None), out_axes=STATE)
    step_of_all = jax.vmap(step_of_seed, in_axes=(STATE, None, 0, 0), out_axes=STATE)

    def step(state, batches):
        batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        return step_of_all(state, factors, seeds, batch)

    return jax.jit(step, donate_argnums=0)


def make_evaluate(config: ConfigDict, model: AbstractModel, loader: Loader) -> Callable:
    """Returns `state -> accuracies [seeds, runs]` on the images of a loader."""
    eval_step = make_eval_step(model, config.data.mean, config.data.std)

    @jax.jit
    def is_correct(state, batch):
        def of_run(state):
            results = eval_step(state.params, state.model_state, batch)
            return results["predicted"] == results["label"]

        return jax.vmap(jax.vmap(of_run, in_axes=(STATE,)), in_axes=(STATE,))(state)

    def evaluate(state):
        batches = loader.eval_batches(batch_size=EVAL_BATCH)
        correct = [is_correct(state, batch) for batch in batches]
        return np.concatenate(correct, axis=-1)[..., : len(loader)].mean(axis=-1)  # no padding

    return evaluate


def sweep(
    config: ConfigDict, schemes: list[AttentionInit], rates: list[float], num_seeds: int
) -> tuple[TrainState, dict[int, np.ndarray]]:
    """Trains all runs, and returns their states and their accuracies by step.

    Arrays have leading axes [seeds, runs]; runs are ordered by rate, then by scheme. Accuracies are
    on `config.data.eval_split`.
    """
    if config.augment.crop == "resized" or config.start_from or config.ema_decay:
        raise InputError("augment.crop='resized', start_from and ema_decay are not supported")
    config_lib.validate(config)
    data = config.data
    size = data.image_size
    train_source, eval_source = build.open_splits(config, build.open_data(config))
    mesh = build.make_mesh(config, jax.devices()[:1])
    schedule = build.make_schedule(config, len(train_source))
    model = build.make_model(config, mesh)
    train = make_loader(train_source, mesh, CenterCrop(size))
    test = make_loader(eval_source, mesh, CenterCrop(size, data.crop_fraction))
    seeds = np.arange(num_seeds, dtype=np.uint32)
    weights = draw_weights(model, schemes, seeds)
    weights = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * len(rates), axis=1), weights)
    optimizer = build.make_optimizer(config, schedule.learning_rate, model)

    def init(params, model_state):
        return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params))

    # Laid out as the step returns it; otherwise the second step would be compiled, too.
    init = jax.vmap(jax.vmap(init, out_axes=STATE), out_axes=STATE)
    state = jax.jit(init, out_shardings=sharding.replicated(mesh))(*weights)
    step = make_step(config, model, schedule, np.repeat(np.float32(rates), len(schemes)), seeds)
    evaluate = make_evaluate(config, model, test)
    accuracies = {}
    stream = functools.partial(
        train.train_batches,
        batch_size=config.batch_size,
        start_step=0,
        num_steps=schedule.num_steps,
        repeats=data.repeats,
        drop_remainder=data.drop_remainder,
    )
    streams = [stream(seed=int(seed)) for seed in seeds]
    for number, batches in enumerate(zip(*streams, strict=True), start=1):
        state = step(state, batches)
        if number in schedule.eval_steps:
            accuracies[number] = evaluate(state)
    return state, accuracies


def main(overrides: command_line.Overrides) -> None:
    """Prints the accuracies of all runs and writes them as JSON."""
    config = command_line.read_config(overrides)
    out = command_line.out_path("sweep.json")
    schemes = list(map(read_scheme, SCHEME.value))
    rates = list(map(float, RATES.value))
    for field, _ in overrides:
        if field == "seed" or field.startswith("attention_init."):
            raise InputError(f"--config.{field} is not used: see --scheme and --num_seeds")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()  # fails now rather than after the training
    began = time.perf_counter()
    _, accuracies = sweep(config, schemes, rates, NUM_SEEDS.value)
    labels = [f"{name}, rate × {rate:g}" for rate in rates for name in SCHEME.value]
    print(f"{NUM_SEEDS.value} runs each of {len(labels)}, {time.perf_counter() - began:.0f} s")
    by_step = {}
    for step, values in accuracies.items():
        print(f"{config.data.eval_split} accuracy in % after step {step}")
        by_step[step] = dict(zip(labels, values.T.tolist(), strict=True))
        for label, by_seed in zip(labels, 100 * values.T, strict=True):
            print(
                f"  {label:40} {by_seed.mean():5.1f} ± {by_seed.std(ddof=1):.1f}", by_seed.round(2)
            )
    device = jax.devices()[0].device_kind
    used = {k: v for k, v in config.to_dict().items() if k not in ("seed", "attention_init")}
    results = {"config": used, "device": device, "accuracies": by_step}
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    command_line.run(main, shared=("config", "out"))
