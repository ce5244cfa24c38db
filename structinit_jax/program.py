"""Model, optimizer and jitted steps of a run, before any data is read; and its start state."""

import functools
import time
from typing import NamedTuple

import jax
import numpy as np
from clu import parameter_overview
from flax import nnx
from ml_collections import ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from structinit_jax import config as config_lib
from structinit_jax.augment import make_augment
from structinit_jax.data.info import DatasetInfo
from structinit_jax.data.loader import AugmentationSplit, split_augmentation
from structinit_jax.data.test_sets import EvaluationSet
from structinit_jax.errors import InputError
from structinit_jax.interop import select_weights
from structinit_jax.models.registry import create_model
from structinit_jax.training import mesh as mesh_lib
from structinit_jax.training.optimizer import make_optimizer
from structinit_jax.training.schedule import learning_rate_schedule
from structinit_jax.training.state import TrainState, init_state, split_model
from structinit_jax.training.step import make_eval_step, make_train_step

# Steps dispatched ahead of the device: enough to keep it busy, few enough that their batches fit.
MAX_IN_FLIGHT = 2
MAX_STEPS = 2**31 - 1  # the state counts them as int32


class Plan(NamedTuple):
    """Steps of a run.

    Attributes:
      num_steps: optimizer steps in all.
      steps_per_epoch: fractional, since batches run on across the end of an epoch.
      eval_steps: after which of them the model is evaluated; the last is one.
      augmentation: where training images are cut.
    """

    num_steps: int
    steps_per_epoch: float
    eval_steps: frozenset[int]
    augmentation: AugmentationSplit


def make_plan(config: ConfigDict, info: DatasetInfo, num_examples: int) -> Plan:
    """Turns epochs into steps, and chooses the way of the images.

    Raises:
      InputError: for more steps than can be counted, or an unusable augmentation.
    """
    steps_per_epoch = num_examples / config.batch_size
    num_steps = config.num_steps or max(1, round(config.num_epochs * steps_per_epoch))
    if num_steps > MAX_STEPS:
        field = "num_steps" if config.num_steps else "num_epochs"
        raise InputError(
            f"config.{field}={config[field]!r} makes {num_steps:,} steps; no more than "
            f"{MAX_STEPS:,} can be counted"
        )
    interval = max(1.0, config.eval_every_epochs * steps_per_epoch)  # no step is evaluated twice
    count = int(num_steps / interval)
    eval_steps = frozenset(round(interval * (i + 1)) for i in range(count)) | {num_steps}
    options = config_lib.augment_options(config)
    augmentation = split_augmentation(options, info, num_examples, config.seed)
    return Plan(num_steps, steps_per_epoch, eval_steps - {0}, augmentation)


class Program(NamedTuple):
    """The model and its steps, before anything is computed.

    Attributes:
      mesh: all devices.
      graphdef: the model without its arrays.
      init_model: key -> (parameters, model state) with the model's default start values.
      init_attention: (parameters, model state, key) -> the same two with the scheme's start values,
        and the solve's report.
      init_state: (parameters, model state) -> the state before the first step; consumes them.
      train_step: (state, batch) -> (state, metrics), jitted; consumes the state.
      eval_step: (parameters, model state, batch) -> sums, jitted.
      abstract_state: shapes, types and shardings of the state.
      abstract_batch: the same of a global training batch.
    """

    mesh: jax.sharding.Mesh
    graphdef: nnx.GraphDef
    init_model: jax.stages.Wrapped
    init_attention: jax.stages.Wrapped
    init_state: jax.stages.Wrapped
    train_step: jax.stages.Wrapped
    eval_step: jax.stages.Wrapped
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]


def build_program(
    config: ConfigDict, plan: Plan, evaluation_set: EvaluationSet | None = None
) -> Program:
    """Builds model, optimizer and jitted steps. Allocates nothing on the devices.

    Args:
      config: the run's.
      plan: its steps.
      evaluation_set: what `eval_step` judges by; None where its labels are classes.
    """
    mesh = mesh_lib.make_mesh(config.fsdp)
    mesh_lib.check_batch_size(config.batch_size, mesh.size, config.accumulate_steps)
    replicated, sharded = mesh_lib.replicated(mesh), mesh_lib.batch_sharding(mesh)
    size, stored = config.data.image_size, plan.augmentation.image_size

    def make_model(key):
        return create_model(
            config.model.to_dict(),
            image_size=size,
            channels=config.data.channels,
            rngs=nnx.Rngs(params=key),
        )

    graphdef, *abstract_model = split_model(nnx.eval_shape(make_model, jax.random.key(0)))
    scheme = config_lib.make_attention_init(config)

    def init_attention(params, model_state, key):
        model = nnx.merge(graphdef, params, model_state)
        report = model.initialize_attention(scheme, key)
        return *split_model(model)[1:], report

    # Traced once here, so that a scheme that does not fit the model says so before data is read.
    jax.eval_shape(init_attention, *abstract_model, jax.random.key(0))

    schedule = learning_rate_schedule(
        config, num_steps=plan.num_steps, steps_per_epoch=plan.steps_per_epoch
    )
    optimizer = make_optimizer(config, schedule)
    augment = make_augment(plan.augmentation.on_device, mesh)
    make_state = functools.partial(init_state, optimizer=optimizer, with_ema=bool(config.ema_decay))
    abstract_state = mesh_lib.shard_state(mesh, jax.eval_shape(make_state, *abstract_model))
    state_shardings = jax.tree.map(lambda x: x.sharding, abstract_state)
    model_shardings = (state_shardings.params, state_shardings.model_state)
    rule = (evaluation_set.classes, evaluation_set.answers) if evaluation_set else ()
    return Program(
        mesh=mesh,
        graphdef=graphdef,
        init_model=jax.jit(
            lambda key: tuple(split_model(make_model(key))[1:]), out_shardings=model_shardings
        ),
        init_attention=jax.jit(
            init_attention, donate_argnums=(0, 1), out_shardings=(*model_shardings, replicated)
        ),
        init_state=jax.jit(make_state, out_shardings=state_shardings, donate_argnums=(0, 1)),
        train_step=jax.jit(
            make_train_step(config, graphdef, optimizer, schedule, augment, replicated),
            in_shardings=(state_shardings, sharded),
            out_shardings=(state_shardings, replicated),
            donate_argnums=0,
        ),
        eval_step=jax.jit(
            make_eval_step(config, graphdef, replicated, *rule),
            in_shardings=(*model_shardings, sharded),
            out_shardings=replicated,
        ),
        abstract_state=abstract_state,
        abstract_batch={
            "image": jax.ShapeDtypeStruct(
                (config.batch_size, stored, stored, config.data.channels),
                np.uint8,
                sharding=sharded,
            ),
            "label": jax.ShapeDtypeStruct((config.batch_size,), np.int32, sharding=sharded),
        },
    )


def initialize(config: ConfigDict, program: Program) -> TrainState:
    """Draws the start state and says how long the attention solve took and how close it came.

    With `config.start_from` all but the head is selected from that file instead (Xu et al. 2024).

    Raises:
      InputError: if the file's weights do not fit the model.
    """
    params_key, attention_key = jax.random.split(jax.random.key(config.seed))
    if config.start_from:
        return program.init_state(*_select_from_file(config.start_from, program, params_key))
    model = program.init_model(params_key)
    start = time.perf_counter()
    solve = program.init_attention.lower(*model, attention_key).compile()
    compiled = time.perf_counter()
    *model, report = jax.block_until_ready(solve(*model, attention_key))
    text = (
        f"attention_init {config.attention_init.name}: {time.perf_counter() - compiled:.2f} s "
        f"(and {compiled - start:.2f} s to compile)"
    )
    if report is not None:
        text += (
            f", loss {report.loss:.2e}, {100 * report.target_mass:.1f} % of the attention on "
            f"target, {100 * report.hit_rate:.0f} % of the rows peak there, "
            f"{report.steps:.0f} solver steps"
        )
    print(text, flush=True)
    return program.init_state(*model)


def _select_from_file(path: str, program: Program, key: jax.Array) -> tuple[dict, dict]:
    """Parameters and model state: a file's, in timm's names, and a head drawn by the key."""
    try:
        teacher = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"config.start_from={path!r} cannot be read: {error}. It needs to be a safetensors file"
            " with the weights of a model of timm"
        ) from error
    drawn = program.init_model(key)
    gather = jax.jit(lambda model: model, out_shardings=mesh_lib.replicated(program.mesh))
    student = nnx.merge(program.graphdef, *jax.device_get(gather(drawn)))
    try:
        student = select_weights(teacher, student)
    except InputError as error:
        raise InputError(f"config.start_from={path!r} does not fit the model: {error}") from error

    def place(weight, like):
        return jax.make_array_from_callback(like.shape, like.sharding, lambda i: weight[i])

    print(f"weights selected from {path}; attention_init is not used", flush=True)
    selected = jax.tree.map(np.asarray, tuple(split_model(student)[1:]))
    return jax.tree.map(place, selected, drawn)


def parameter_table(program: Program) -> str:
    """Name, shape and size of every trained weight; layers of a stack share a row."""
    return parameter_overview.get_parameter_overview(
        program.abstract_state.params, include_stats=False
    )
