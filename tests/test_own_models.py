"""Models of a user's own in the trainer, built as is usual in Flax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_batch, set_up
from flax import nnx

from structinit_jax import AttentionSite, AttentionWeights, ConvSite, VisionTransformer
from structinit_jax.analysis import collect
from structinit_jax.errors import InputError
from structinit_jax.models.convmixer import ConvMixerBlock
from structinit_jax.models.layers import StackedBlock
from structinit_jax.models.model import Model, make_stack, run_stack
from structinit_jax.models.transformer import Block

pytestmark = pytest.mark.usefixtures("library_promotion")


class Base(Model):
    """A linear model on the features [B, 16] of `features`."""

    def __init__(self, *, image_size, channels, num_classes=10, rngs):
        self.embed = nnx.Linear(image_size**2 * channels, 16, rngs=rngs)
        self.head = nnx.Linear(16, num_classes, rngs=rngs)

    def features(self, x, rng):
        return x

    def __call__(self, images, *, rng=None, with_maps=False):
        x = self.embed(images.reshape(len(images), -1))
        return self.head(self.features(x, rng)), {}


class Counting(StackedBlock):
    """Draws a dropout mask from a stream that it keeps, and counts its calls."""

    def __init__(self, *, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, *, drop_path_rate=None, rng=None):
        self.calls[...] += 1
        return self.dropout(x, deterministic=rng is None), {}


class Kept(Base):
    """Has streams and counters, outside of a stack and in one."""

    def __init__(self, **options):
        super().__init__(**options)
        self.single = Counting(rngs=options["rngs"])
        self.blocks = make_stack(Counting, 3, rngs=options["rngs"])

    def features(self, x, rng):
        x, _ = self.single(x, rng=rng)
        x, _ = run_stack(self.blocks, x, remat="none", drop_path_rates=[0.0] * 3, rng=rng)
        return x


class Listed(Base):
    """Has blocks of ours that are no stack."""

    def __init__(self, **options):
        super().__init__(**options)
        sizes = dict(width=16, num_heads=2, mlp_ratio=1.0, base_init="timm", dtype=jnp.float32)
        self.layers = nnx.List([Block(**sizes, rngs=options["rngs"]) for _ in range(2)])

    def features(self, x, rng):
        x = x[:, None]
        for layer in self.layers:
            x, _ = layer(x, drop_path_rate=None, rng=rng)
        return x[:, 0]


def plateau(learning_rate):
    """An optimizer that sees single layers, all parameters, and the loss."""
    return optax.chain(optax.contrib.muon(learning_rate), optax.contrib.reduce_on_plateau())


@pytest.fixture
def shared_config(tiny_config):
    tiny_config.attention_init = dict(name="default")
    return tiny_config


def take_steps(config, name, count=2):
    config.model = dict(name=f"{__name__}:{name}", num_classes=10)
    setup = set_up(config, jax.devices()[:1])
    state = setup.initialize()
    for _ in range(count):
        state, metrics = setup.train_step(state, make_batch(), np.uint32(0))
    return jax.device_get((state, metrics))


def test_streams_and_counters_go_on_from_step_to_step(config):
    state, _ = take_steps(config, "Kept")
    for name, shape in (("single", ()), ("blocks", (3,))):
        kept = state.model_state[name]
        for counter in (kept["calls"], kept["dropout"]["rngs"]["count"]):
            np.testing.assert_array_equal(counter, np.full(shape, 2))


def test_blocks_without_a_layer_axis_are_no_stack(config):
    config.optimizer = f"{__name__}:plateau"
    state, metrics = take_steps(config, "Listed")
    assert np.isfinite(metrics["loss"])
    assert optax.tree.get(state.opt_state, "best_value") <= metrics["loss"]


class Stored(Base):
    def __init__(self, *, rngs, **options):
        super().__init__(rngs=rngs, **options)
        self.rngs = rngs


class Empty(Base):
    def __init__(self, **options):
        super().__init__(**options)
        self.prompts = nnx.Param(jnp.zeros((0, 16)))


class Whole(Base):
    def __init__(self, **options):
        super().__init__(**options)
        self.index = nnx.Param(jnp.arange(3))


class LogitsOnly(Base):
    def __call__(self, images, *, rng=None, with_maps=False):
        return super().__call__(images, rng=rng)[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Stored", r"^config.model.*rngs in the model=.* nnx\.Rngs\(rngs\.params\(\)\)"),
        ("Empty", r"^config.model.*: model: prompts=.* must be not empty: "),
        ("Whole", r"^config.model.*: model: index=.* nnx\.Variable"),
        ("LogitsOnly", r"^config\.model: the result of __call__=.* return logits, \{\}"),
    ],
)
def test_what_does_not_train_is_named(config, name, message):
    with pytest.raises(InputError, match=message):
        take_steps(config, name, count=1)


class WithRegisters(VisionTransformer):
    def __init__(self, *, registers=4, patch_size=2, **options):
        super().__init__(patch_size=patch_size, **options)


class Stages(Model):
    """Blocks in two stacks, which share the model's positions."""

    def __init__(self, *, grids=((4, 4), (4, 4)), table=(16, 16), rngs):
        sizes = dict(width=16, num_heads=2, mlp_ratio=1.0, base_init="timm", dtype=jnp.float32)
        self.grids = grids
        self.positions = nnx.Param(jnp.ones(table))
        self.stages = nnx.List([make_stack(Block, 1, rngs=rngs, **sizes) for _ in grids])

    def sites(self):
        sites = {}
        for i, (grid, stack) in enumerate(zip(self.grids, self.stages, strict=True)):
            positions = np.ones((math.prod(grid), 16))
            options = dict(positions=positions, positions_trainable=True)
            sites[f"stages/{i}"] = AttentionSite(grid, **stack.sizes(), **options)
        return sites


def test_stacks_that_share_positions_scale_them_once():
    model = Stages(rngs=nnx.Rngs(0))
    scaled = AttentionWeights(position_scale=18.0)
    model.initialize_attention(lambda rng, site: scaled, jax.random.key(0))
    np.testing.assert_array_equal(model.positions[...], np.full((16, 16), 18.0))


@pytest.mark.parametrize(
    ("options", "weights", "message"),
    [
        (dict(grids=((4, 4), (2, 2))), dict(position_scale=2.0), r"sites=.* one grid and width"),
        ({}, dict(patch_bias=jnp.ones(16)), r"sites=.*stages/1.* must be a single stack"),
        (dict(table=(1, 16, 16)), dict(position_scale=2.0), r"Stages\.positions=array of shape "),
    ],
)
def test_stacks_that_cannot_share_an_embedding_are_refused(options, weights, message):
    model = Stages(rngs=nnx.Rngs(0), **options)
    with pytest.raises(InputError, match=f"^{message}"):
        model.initialize_attention(lambda rng, site: AttentionWeights(**weights), jax.random.key(0))


class Silent(VisionTransformer):
    def __call__(self, images, **options):
        return super().__call__(images, **options)[0], {}


def test_an_analysis_names_the_intermediates_that_it_lacks(config):
    config.model = dict(name=f"{__name__}:Silent", num_classes=10, patch_size=4, num_heads=2)
    config.model.update(width=16, depth=1)
    with pytest.raises(InputError, match=r"^intermediates of the model=\[\] must be .* for blocks"):
        collect.observe_start(config, np.zeros((8, 8, 8, 1), np.uint8))


class Hybrid(VisionTransformer):
    def __init__(self, *, rngs, **options):
        super().__init__(rngs=rngs, **options)
        options = dict(kernel_size=3, fixed=False, dtype=jnp.float32, rngs=rngs)
        self.stem = make_stack(ConvMixerBlock, 1, width=self.width, **options)

    def sites(self):
        return super().sites() | {"stem": ConvSite(3, width=self.width, num_layers=1)}


def test_a_model_with_attention_and_convolutions_is_not_analyzed(config):
    config.model = dict(name=f"{__name__}:Hybrid", num_classes=10, patch_size=4, num_heads=2)
    config.model.update(width=16, depth=1)
    with pytest.raises(InputError, match=r"^config\.model\.name=.* sites are all attention, or "):
        collect.observe_start(config, np.zeros((8, 8, 8, 1), np.uint8))


def test_a_subclass_has_the_fields_that_it_passes_on():
    fields = VisionTransformer.default_config() | dict(patch_size=2, registers=4)
    assert WithRegisters.default_config() == fields
