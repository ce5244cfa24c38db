"""The training state: the shapes of its arrays, and its initialization."""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from structinit_jax.attention_init import AttentionInit
from structinit_jax.attention_init.solve import reach_warning
from structinit_jax.errors import InputError, prefixed, printable
from structinit_jax.models.timm import select_weights
from structinit_jax.rngs import split_seed
from structinit_jax.training import sharding


class TrainState(NamedTuple):
    """Everything that changes in training. Data order and random keys follow from (seed, step)."""

    step: Int[Array, ""]  # number of optimizer steps taken
    params: dict[str, Any]  # trained parameters of the model, a nested dict of float32 arrays
    # The other arrays of the model, in the same form: fixed weights and the running statistics that
    # the forward pass updates. Empty for a ViT.
    model_state: dict[str, Any]
    opt_state: optax.OptState  # empty in a state that was restored for evaluation
    # Moving averages of params and model_state, by these names; None if there are none.
    ema: dict[str, Any] | None = None

    @property
    def weights(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The params and model_state to evaluate: their averages, if there are any."""
        averages = self.ema or self._asdict()
        return averages["params"], averages["model_state"]


class AbstractModel(NamedTuple):
    """A model whose arrays are not allocated.

    `params` and `model_state` have shapes, types and shardings. Given real arrays of these shapes,
    `nnx.merge(graphdef, params, model_state)` is the model.
    """

    create: Callable[[PRNGKeyArray], nnx.Module]  # draws real arrays
    mesh: jax.sharding.Mesh
    graphdef: nnx.GraphDef
    params: dict[str, Any]
    model_state: dict[str, Any]
    stacks: tuple[str, ...]  # see `Model.stacks`
    decayed: dict[str, Any]  # like the params: whether weight decay applies, see `Model.decays`


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, dict[str, Any], dict[str, Any]]:
    """Splits a model into its definition, its parameters and its other arrays."""
    graphdef, params, model_state = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)


def abstract_model(
    create: Callable[[PRNGKeyArray], nnx.Module], mesh: jax.sharding.Mesh
) -> AbstractModel:
    """Traces the creation of a model, and places its arrays on a mesh."""
    model = nnx.eval_shape(lambda: create(jax.random.key(0)))
    sharding.gather_by_block(model, mesh)
    stacks = model.stacks()
    graphdef, params, model_state = split_model(model)
    decayed = jax.tree_util.tree_map_with_path(
        lambda path, _: model.decays([key.key for key in path]), params
    )
    shapes = sharding.shard(mesh, {"params": params, "model_state": model_state}, stacks)
    return AbstractModel(create, mesh, graphdef, **shapes, stacks=stacks, decayed=decayed)


def init_state(
    params: dict[str, Any],
    model_state: dict[str, Any],
    optimizer: optax.GradientTransformation,
    with_averages: bool = False,
) -> TrainState:
    """Returns the state before the first step."""
    ema = None
    if with_averages:
        # Copies, since a training step could not donate one array twice.
        ema = jax.tree.map(jnp.copy, {"params": params, "model_state": model_state})
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params), ema)


def abstract_state(
    model: AbstractModel, optimizer: optax.GradientTransformation, with_averages: bool = False
) -> TrainState:
    """Returns shapes, types and shardings of the training state of a model."""
    init = functools.partial(init_state, optimizer=optimizer, with_averages=with_averages)
    state = jax.eval_shape(init, model.params, model.model_state)
    return sharding.shard(model.mesh, state, model.stacks)


# -- initialization --------------------------------------------------------------------------------


def initialize_model(
    model: AbstractModel, scheme: AttentionInit, seed: int, start_from: str = "", name: str = ""
) -> tuple[dict, dict, dict[str, float]]:
    """Initializes a model, and prints the scheme's `name` with the cost and quality of its solve.

    If `start_from` is set, all weights but the head are selected from this safetensors file instead
    (Xu et al. 2024, "Initializing Models with Larger Ones"). Raises `InputError` if they do not fit
    the model.

    Returns:
      Parameters, model state and metrics: 'init/seconds', 'init/compile_seconds', and for a scheme
      that solves, 'init/loss', 'init/target_mass' and the other fields of its `SolveReport`,
      averaged over the stacks. No metrics with `start_from`.
    """
    seed = np.uint32(seed)  # the key is made and split in `draw`, within one program
    if start_from:
        return *_select_from_file(model, seed, start_from), {}

    def draw(seed):
        params_rng, attention_rng, _ = split_seed(seed)
        network = model.create(params_rng)
        weights = network.initialize_attention(scheme, attention_rng).values()
        reports = [w.report for w in weights if getattr(w, "report", None) is not None]
        report = None
        if reports:
            report = jax.tree.map(lambda *values: sum(values) / len(values), *reports)
        return *split_model(network)[1:], report

    print(f"attention_init {name}: compiling", flush=True)
    start = time.perf_counter()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (model.params, model.model_state))
    traced = jax.jit(draw, out_shardings=(*shardings, sharding.replicated(model.mesh))).lower(seed)
    program = traced.compile(_options_for_one_run())
    compiled = time.perf_counter()
    params, model_state, report = jax.block_until_ready(program(seed))
    seconds = time.perf_counter() - compiled
    compile_seconds = compiled - start
    metrics = {"init/seconds": seconds, "init/compile_seconds": compile_seconds}
    text = f"attention_init {name}: {seconds:.2f} s (plus {compile_seconds:.2f} s to compile)"
    if report is not None:
        report = jax.device_get(report)
        metrics |= {f"init/{name}": float(value) for name, value in report._asdict().items()}
        text += (
            f", loss {report.loss:.2e}; without image content, {100 * report.target_mass:.1f} % of "
            f"the attention on target, {100 * report.hit_rate:.0f} % of the rows peak on target"
        )
        warning = reach_warning(report)
        text += f"\nwarning: {warning}" if warning else ""
    print(text, flush=True)
    return params, model_state, metrics


def initialize_state(
    params: dict[str, Any],
    model_state: dict[str, Any],
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
) -> TrainState:
    """Returns the state before the first step, placed as in `abstract`; donates the weights."""
    with_averages = abstract.ema is not None
    init = functools.partial(init_state, optimizer=optimizer, with_averages=with_averages)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(init, out_shardings=shardings, donate_argnums=(0, 1))(params, model_state)


def find_targets(
    model: AbstractModel, scheme: AttentionInit, seed: int
) -> dict[str, tuple[Int[np.ndarray, "first h"], Float[np.ndarray, "F N N"]]]:
    """Returns the target maps that the heads of a run started from.

    These are `(filter_index, targets)` by the name of each stack that has targets: the index of
    each head's map, and the distinct maps. Last layers without targets have no row in
    `filter_index`.
    """

    @jax.jit  # removes the solve, whose result is not used
    def find(seed):
        params_rng, attention_rng, _ = split_seed(seed)
        weights = model.create(params_rng).initialize_attention(scheme, attention_rng)
        # Schemes that do not solve have no targets.
        with_targets = {k: w for k, w in weights.items() if getattr(w, "targets", None) is not None}
        return {k: (w.filter_index, w.targets) for k, w in with_targets.items()}

    return jax.device_get(find(np.uint32(seed)))


def _options_for_one_run() -> dict[str, Any]:
    """Returns XLA options for a program that runs once, which halve its compile time on CPUs.

    It runs as fast as with all optimizations. Nothing is set if the user sets `XLA_FLAGS`.
    """
    if jax.default_backend() != "cpu" or "XLA_FLAGS" in os.environ:
        return {}
    options = {"xla_backend_optimization_level": 1, "xla_cpu_parallel_codegen_split_count": 1}
    if jaxlib.version.__version_info__ < (0, 11):  # later ones have no such option
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def _select_from_file(model: AbstractModel, seed: np.uint32, path: str) -> tuple[dict, dict]:
    """Selects all weights but the head, which is drawn, from a safetensors file."""
    try:
        teacher = load_file(Path(path).expanduser())
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"config.start_from={path!r} cannot be read: {error}. It must be a safetensors file of "
            "a timm model, such as structinit_jax.export writes"
        ) from error
    draw = jax.jit(lambda seed: split_model(model.create(split_seed(seed)[0]))[1:])
    student = nnx.merge(model.graphdef, *jax.device_get(draw(seed)))
    with prefixed(f"config.start_from={path!r} does not fit the model: "):
        student = select_weights(teacher, student)
    print(f"weights selected from {printable(path)}; config.attention_init is not used", flush=True)

    def place(weight, like):
        weight = np.asarray(weight)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda i: weight[i])

    return jax.tree.map(place, split_model(student)[1:], (model.params, model.model_state))
