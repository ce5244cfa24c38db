"""The training state: the shapes of its arrays, and its initialization."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import optax
from flax import nnx, traverse_util
from jaxtyping import Array, Float, Int, PRNGKeyArray
from ml_collections import ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from structinit_jax.attention_init.solve import reach_warning
from structinit_jax.config import make_attention_init
from structinit_jax.errors import InputError, prefixed, printable, require
from structinit_jax.models.model import InitStream
from structinit_jax.models.timm import select_weights
from structinit_jax.rngs import split_seed
from structinit_jax.training import sharding


class TrainState(NamedTuple):
    """Everything that training changes. Data order and random keys follow from (seed, step)."""

    step: Int[Array, ""]  # number of optimizer steps taken
    params: dict[str, Any]  # trained parameters of the model, a nested dict of float32 arrays
    # The other arrays of the model, in the same form: fixed weights and the running statistics that
    # the forward pass updates. Empty for a ViT.
    model_state: dict[str, Any]
    opt_state: optax.OptState | None  # None in a state that was restored for evaluation
    # Moving averages of 'params' and 'model_state', by name; None if disabled.
    ema: dict[str, Any] | None = None

    @property
    def weights(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The params and model_state to evaluate: the moving averages, if there are any."""
        if self.ema is None:
            return self.params, self.model_state
        return self.ema["params"], self.ema["model_state"]


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
    for _, node in nnx.iter_graph(model):
        attributes = vars(node) if isinstance(node, nnx.Module) else {}
        for name, value in attributes.items():
            needs = "an nnx.Variable or a NumPy array: Flax cannot trace other arrays of a model"
            # Before Python 3.14, Flax takes such an array for a constant, and a tracer is left.
            is_array = isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct)
            require(f"{type(node).__name__}.{name}", value, needs, not is_array)
        kind = type(node).__name__
        needs = "left out: keep a stream of its own, such as nnx.Rngs(rngs.params()), or use rng"
        require("rngs in the model", kind, needs, not isinstance(node, InitStream))
    sharding.place_stacks(model, mesh)
    stacks = tuple(model.stacks())
    graphdef, params, model_state = split_model(model)
    for tree, is_trained in ((params, True), (model_state, False)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = f"model: {jax.tree_util.keystr(path, simple=True, separator='/')}"
            require(name, leaf, "not empty: checkpoints hold no empty arrays", leaf.size)
            needs = "of a floating-point type, as it is trained: make it an nnx.Variable"
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            require(name, leaf, needs, is_float or not is_trained)
    decayed = traverse_util.path_aware_map(lambda path, _: model.decays(list(path)), params)
    params = sharding.shard_params(params, mesh, stacks)
    everywhere = sharding.replicated(mesh)
    model_state = jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), model_state)
    return AbstractModel(create, mesh, graphdef, params, model_state, stacks, decayed)


def abstract_state(
    model: AbstractModel, optimizer: optax.GradientTransformation, with_averages: bool = False
) -> TrainState:
    """Returns the shapes, types and shardings of a model's training state."""
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(model.mesh))
    opt_state = jax.eval_shape(optimizer.init, model.params)
    opt_state = sharding.shard_opt_state(opt_state, model.mesh, model.params, model.stacks)
    averages = {"params": model.params, "model_state": model.model_state}
    ema = averages if with_averages else None
    return TrainState(step, model.params, model.model_state, opt_state, ema)


# -- initialization --------------------------------------------------------------------------------


class InitialModel(NamedTuple):
    """The arrays that a run starts from, and the report of the scheme that set them."""

    weights: tuple[dict[str, Any], dict[str, Any]]  # parameters and model state
    # 'init/seconds', 'init/compile_seconds' and, for schemes with a solver, 'init/loss' and the
    # rest of the report, averaged over the stacks. Empty if the weights come from a file.
    metrics: dict[str, float]
    # For each stack whose heads have filters, by name: the index of each head's filter, and the
    # distinct filters. Trailing layers without filters have no row of indices.
    filters: dict[str, tuple[Int[Array, "first h"], Float[Array, "F y x"]]]


def make_initializer(config: ConfigDict, model: AbstractModel) -> Callable[[], InitialModel]:
    """Traces the program that draws a model's arrays and replaces those that a scheme sets.

    Returns a function that runs the program and prints the report of the scheme or, with
    `config.start_from`, that selects the weights from this file. Raises `InputError` if the scheme
    does not fit the model, or if there is no such file.
    """
    scheme = make_attention_init(config)
    if path := config.start_from:
        needs = "an existing safetensors file"
        require("config.start_from", path, needs, Path(path).expanduser().is_file())
        return functools.partial(_initialize_from_file, model, config.seed, path)

    def draw(seed):
        params_rng, attention_rng, _ = split_seed(seed)
        network = model.create(params_rng)
        stacks = network.initialize_attention(scheme, attention_rng)
        if not stacks and config.attention_init.name != "default":
            print(f"note: config.model.name={config.model.name} has no sites, so no scheme is used")
        # Only some kinds of weights have reports and filters.
        reports = [w.report for w in stacks.values() if getattr(w, "report", None) is not None]
        filters = {
            name: (w.filter_index, w.filters)
            for name, w in stacks.items()
            if getattr(w, "filters", None) is not None
        }
        return split_model(network)[1:], reports, filters

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (model.params, model.model_state))
    replicated = sharding.replicated(model.mesh)
    out_shardings = (shardings, replicated, replicated)
    with prefixed("config.attention_init: "):
        # The key is made and split in `draw`, within one program.
        traced = jax.jit(draw, out_shardings=out_shardings).trace(np.uint32(config.seed))
    return functools.partial(_run_scheme, config, model, traced)


def _run_scheme(
    config: ConfigDict, model: AbstractModel, traced: jax.stages.Traced
) -> InitialModel:
    """Compiles and runs the program of `make_initializer`."""
    start = time.perf_counter()
    # The kernel draws a whole array at once, and sharded weights may not fit on one device.
    with _random_kernels(model.mesh.shape[sharding.FSDP_AXIS] == 1):
        lowered = traced.lower()
    program = lowered.compile(_options_for_one_run())
    compiled = time.perf_counter()
    weights, reports, filters = jax.block_until_ready(program(np.uint32(config.seed)))
    seconds = time.perf_counter() - compiled
    metrics = {"seconds": seconds, "compile_seconds": compiled - start}
    text = f"{seconds:.2f} s (plus {compiled - start:.2f} s to compile)"
    if reports:
        report = jax.tree.map(lambda *values: float(np.mean(values)), *jax.device_get(reports))
        metrics |= report._asdict()
        text += (
            f", loss {report.loss:.2e}; without image content, {100 * report.target_mass:.1f} % of "
            f"the attention on target, {100 * report.hit_rate:.0f} % of the rows peak on target"
        )
        if warning := reach_warning(report):
            text += f"\nwarning: {warning}"
    print(f"attention_init {config.attention_init.name}: {text}", flush=True)
    metrics = {f"init/{name}": value for name, value in metrics.items()}
    return InitialModel(weights, metrics, filters)


def _initialize_from_file(model: AbstractModel, seed: int, path: str) -> InitialModel:
    """Selects the weights of a model from a larger model in a safetensors file.

    This is the method of Xu et al. 2024, "Initializing Models with Larger Ones". The head is drawn
    at random.
    """
    try:
        teacher = load_file(Path(path).expanduser())
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"config.start_from={path!r} cannot be read: {error}. It must be a safetensors file of "
            "a timm model"
        ) from error
    draw = jax.jit(lambda seed: split_model(model.create(split_seed(seed)[0]))[1:])
    student = nnx.merge(model.graphdef, *jax.device_get(draw(np.uint32(seed))))
    with prefixed(f"config.start_from={path!r} does not fit the model: "):
        student = select_weights(teacher, student)
    weights = jax.tree.map(np.asarray, split_model(student)[1:])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (model.params, model.model_state))
    print(f"weights selected from {printable(path)}, without a scheme")
    return InitialModel(jax.device_put(weights, shardings), {}, {})


def initialize_state(
    params: dict[str, Any],
    model_state: dict[str, Any],
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
) -> TrainState:
    """Returns the state before the first step, sharded like `abstract`; donates the weights."""

    def init_state(params, model_state):
        ema = None
        if abstract.ema is not None:
            # Copies, because a training step cannot donate the same array twice.
            ema = jax.tree.map(jnp.copy, {"params": params, "model_state": model_state})
        step = jnp.zeros((), jnp.int32)
        return TrainState(step, params, model_state, optimizer.init(params), ema)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(init_state, out_shardings=shardings, donate_argnums=(0, 1))(params, model_state)


@contextlib.contextmanager
def _random_kernels(use: bool) -> Iterator[None]:
    """Makes GPU programs that are lowered in the context draw with JAX's own kernel, if `use`.

    The random numbers are the same, and the programs compile in half the time. Not for training
    steps, where XLA could not fuse the draws with the operations that use them.
    """
    flag = "jax_threefry_gpu_kernel_lowering"
    former = getattr(jax.config, flag)
    jax.config.update(flag, use or former)
    try:
        yield
    finally:
        jax.config.update(flag, former)


def _options_for_one_run() -> dict[str, Any]:
    """Returns XLA options that halve the CPU compile time of a program that runs once.

    The program runs as fast as with all optimizations. No options are set if `XLA_FLAGS` is set.
    """
    if jax.default_backend() != "cpu" or "XLA_FLAGS" in os.environ:
        return {}
    options = {"xla_backend_optimization_level": 1, "xla_cpu_parallel_codegen_split_count": 1}
    if jaxlib.version.__version_info__ < (0, 11):  # Later versions have no such option.
        options["xla_cpu_use_fusion_emitters"] = False
    return options
