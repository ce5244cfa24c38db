"""Every model family: config, sites, every scheme, sharding, bfloat16, remat, training."""

import functools
import inspect
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from structinit_jax import attention_init
from structinit_jax.errors import InputError
from structinit_jax.models import layers, sharding
from structinit_jax.models import model as model_lib
from structinit_jax.models.model import Model
from structinit_jax.models.registry import FAMILIES, VARIANTS, create_model, default_config
from structinit_jax.training.state import split_model

SIZES = {
    "vit": dict(width=16, depth=2, num_heads=2, patch_size=2, dropout=0.1),
    # Lists, as in a config read from JSON.
    "swin": dict(width=16, depths=[2, 1], num_heads=[2, 4], patch_size=1, window_size=4),
    "mixer": dict(width=16, depth=2, patch_size=2, token_mlp_ratio=2.0, dropout=0.1),
    "convmixer": dict(width=16, depth=2, patch_size=2, kernel_size=3),
}
SITES = {
    "vit": {"blocks": attention_init.AttentionSite},
    "swin": {"stage1": attention_init.WindowSite, "stage2": attention_init.WindowSite},
    "mixer": {"blocks": attention_init.TokenMixingSite},
    "convmixer": {"blocks": attention_init.ConvSite},
}
SCHEMES = {
    "vit": sorted(attention_init.SCHEMES),
    "swin": ["default", "impulse", "kaiming_uniform", "mimetic"],
    "mixer": ["default", "impulse", "kaiming_uniform", "mimetic"],
    "convmixer": ["default", "impulse", "impulse_2024", "kaiming_uniform"],
}
OPTIONS = {"impulse_2024": dict(max_steps=3)}
MESH = Mesh(np.asarray(jax.devices()[:2]), ("data",))
EVERYWHERE = NamedSharding(MESH, PartitionSpec())
SPLIT = NamedSharding(MESH, PartitionSpec("data"))
IMAGES = jax.random.normal(jax.random.key(1), (8, 8, 8, 1))
BATCH = jax.device_put((IMAGES, jnp.arange(8) % 4), SPLIT)
pytestmark = pytest.mark.usefixtures("library_promotion")


@functools.cache
def make(family, **changes):
    options = default_config(family) | SIZES[family] | dict(num_classes=4, drop_path=0.5)
    del options["image_size"]
    model = create_model(options | changes, image_size=8, channels=1, rngs=nnx.Rngs(params=0))
    # Mixer's starts at zero, and no gradient would reach its blocks.
    model.head.kernel[...] = 0.1 * jax.random.normal(jax.random.key(2), model.head.kernel.shape)
    return model


def scheme_of(family, name):
    return attention_init.by_name(name, **(OPTIONS.get(name, {}) if family == "vit" else {}))


@functools.cache
def train_fn(family, **changes):
    """(params, state, rng) -> (loss, (logits, intermediates, new state)), gradient."""
    graphdef, *_ = split_model(make(family, **changes))

    def loss_fn(params, state, rng, images, labels):
        model = nnx.merge(graphdef, params, state)
        logits, out = model(images, rng=rng)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits, out, split_model(model)[2])

    compiled = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    return lambda *args: compiled(*jax.device_put(args, EVERYWHERE), *BATCH)


def train(family, rng=0, **changes):
    start = split_model(make(family))[1:]
    return train_fn(family, **changes)(*start, jax.random.key(rng))


@jax.jit
def descend(params, grads):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda p, g: p - 0.02 * g / norm, params, grads)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in SCHEMES for name in SCHEMES[family]]
)
def test_every_model_learns_from_every_scheme(family, name):
    graphdef, *start = split_model(make(family, dtype="bfloat16"))
    scheme, rng = scheme_of(family, name), jax.random.key(0)

    def init(params, state, rng):
        model = nnx.merge(graphdef, params, state)
        model.initialize_attention(scheme, rng)
        return split_model(model)[1:]

    params, state = jax.jit(init, out_shardings=EVERYWHERE)(*start, rng)
    assert jax.tree.map(jnp.shape, [params, state]) == jax.tree.map(jnp.shape, start)
    loss_and_grads = train_fn(family, dtype="bfloat16")
    (before, (_, _, after)), grads = loss_and_grads(params, state, rng)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, after, grads))} == {"float32"}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert loss_and_grads(descend(params, grads), state, rng)[0][0] < before


@pytest.mark.parametrize("family", ["vit", "swin", "mixer"])
def test_every_dropout_and_drop_path_of_every_layer_has_its_own_key(family, monkeypatch):
    keys, drop = [], layers._drop

    def record(x, rate, rng, mask_shape):
        jax.debug.callback(
            lambda key: keys.append(tuple(np.asarray(key))), jax.random.key_data(rng)
        )
        return drop(x, rate, rng, mask_shape)

    monkeypatch.setattr(layers, "_drop", record)
    model = make(family, dropout=0.1)
    model(IMAGES, rng=jax.random.key(3))
    jax.effects_barrier()
    # In each block one after attention in ViT and Swin, two in each MLP, and two drop paths.
    expected = {"vit": 2 * 5 + 1, "swin": 3 * 5, "mixer": 2 * 6}
    assert len(set(keys)) == len(keys) == expected[family]


@pytest.mark.parametrize(
    ("family", "weights", "message"),
    [
        ("vit", attention_init.AttentionWeights(np.ones((16, 2, 8))), r"query .*\(16, 2, 8\)"),
        ("vit", attention_init.AttentionWeights(patch_bias=np.ones(1)), r"patch_bias .*\(1,\)"),
        ("swin", attention_init.AttentionWeights(bias=np.ones((49, 1))), r"bias .*\(49, 1\)"),
        ("mixer", attention_init.TokenMixingWeights(fc1=np.ones((16, 1))), r"fc1 .*\(16, 1\)"),
        ("convmixer", attention_init.ConvWeights(np.ones((3, 3, 16))), r"kernel .*\(3, 3, 16\)"),
    ],
)
def test_weights_that_would_be_broadcast_are_refused(family, weights, message):
    with pytest.raises(InputError, match=rf"weights\.{message}, but the model needs"):
        make(family).initialize_attention(lambda rng, site: weights, jax.random.key(0))


def test_an_initialized_model_has_the_tree_of_a_new_one():
    new, initialized = make("vit"), nnx.clone(make("vit"))
    scales = attention_init.AttentionWeights(patch_scale=0.3, mlp_scale=0.0)
    initialized.initialize_attention(lambda rng, site: scales, jax.random.key(0))
    difference = jax.tree.map(jnp.subtract, initialized, new)
    assert difference.patch_embedding.kernel[...].any()


def test_a_decorated_scheme_is_one():
    def with_option(rng, site, option):
        return attention_init.default()(rng, site)

    @functools.wraps(with_option)
    def scheme(rng, site):
        return with_option(rng, site, option=1)

    make("vit").start_weights(scheme, jax.random.key(0))


def test_a_scheme_that_was_not_called_is_refused():
    with pytest.raises(InputError, match=r"attention_init=impulse .*as in impulse\(\)"):
        make("vit").initialize_attention(attention_init.impulse, jax.random.key(0))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("vit", "depth", 0),
        ("vit", "num_heads", 0),
        ("vit", "width", -16),
        ("vit", "drop_path", 1.0),
        ("vit", "layer_scale", -1.0),
        ("vit", "num_registers", -1),
        ("swin", "depths", (2, 0)),
        ("swin", "num_heads", (2, 0)),
        ("mixer", "mlp_mean", float("nan")),
        ("convmixer", "unroll", -1),
        *((family, "patch_size", 0) for family in SIZES),
    ],
)
def test_constructors_refuse_fields_out_of_range(family, field, value):
    with pytest.raises(InputError, match=rf"^config\.model\.{field}={re.escape(repr(value))} must"):
        make(family, **{field: value})


@pytest.mark.parametrize("image_size", [0, (8, 0)])
def test_constructors_refuse_images_without_two_sides(image_size):
    with pytest.raises(InputError, match=r"config\.data\.image_size="):
        create_model(
            default_config("mixer") | SIZES["mixer"] | dict(image_size=image_size),
            channels=1,
            rngs=nnx.Rngs(0),
        )


@pytest.mark.parametrize(
    ("family", "kind"),
    [("mixer", "TokenMixingWeights"), ("convmixer", "ConvWeights"), ("swin", "AttentionWeights")],
)
def test_schemes_that_return_something_else_are_refused(family, kind):
    with pytest.raises(InputError, match=f"<lambda> returned dict: .*needs to return {kind}"):
        make(family).initialize_attention(lambda rng, site: {}, jax.random.key(0))


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("vit", (1, 4, 16, 1), "images have 2x8 patches, but the model was built for 4x4"),
        ("mixer", (1, 4, 16, 1), "images have 2x8 patches, but the model was built for 4x4"),
        ("vit", (1, 8, 8, 3), r"images have shape \(1, 8, 8, 3\), .*\[B, H, W, 1\]"),
        ("convmixer", (1, 9, 8, 1), r"images have shape \(1, 9, 8, 1\), .*patch size 2"),
    ],
)
def test_images_that_the_model_was_not_built_for_are_refused(family, shape, message):
    with pytest.raises(InputError, match=message):
        make(family)(jnp.zeros(shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_computed_in_bfloat16_and_stays_close_to_float32(family):
    graphdef, *start = split_model(make(family))
    run = jax.jit(lambda *start: nnx.merge(graphdef, *start)(IMAGES, rng=jax.random.key(0))[0])
    (_, (logits, out, _)), _ = train(family, dtype="bfloat16")
    blocks = out["stages"][0]["blocks"] if family == "swin" else out["blocks"]
    assert (blocks["output"].dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(logits, run(*start), atol=0.03)


@pytest.mark.parametrize(("family", "remat"), [("swin", "dots"), ("convmixer", "full")])
def test_unrolled_and_rematerialized_stacks_agree_with_the_scan(family, remat):
    expected, found = train(family), train(family, unroll=0, remat=remat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)


def test_a_scan_in_one_step_recomputes_too():
    def gradient_program(unroll):
        model = make("vit", unroll=unroll, remat="full")
        return str(jax.make_jaxpr(jax.grad(lambda x: model(x)[0].sum()))(IMAGES))

    # XLA could merge the copies of an unrolled loop.
    assert "prevent_cse=False" in gradient_program(1)
    assert "prevent_cse=False" not in gradient_program(100)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_have_second_derivatives_also_with_split_weights(family):
    graphdef, params, state = split_model(make(family))
    mesh = Mesh(np.asarray(jax.devices()[:2]), (sharding.AXIS,))

    def loss(params):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return nnx.merge(graphdef, params, state)(IMAGES, rng=jax.random.key(0))[0].var()

    def products(params):
        gradient = jax.grad(loss)
        forward_over_reverse = jax.jvp(gradient, (params,), (params,))[1]
        return forward_over_reverse, jax.vjp(gradient, params)[1](params)[0]

    # Only lowering notices a derivative that does not exist.
    products = jax.jit(products).lower(params).out_info
    assert {jax.tree.structure(product) for product in products} == {jax.tree.structure(params)}


def test_reverse_mode_twice_is_forward_mode():
    graphdef, params, state = split_model(make("mixer"))  # which has both

    def logits(params):
        return nnx.merge(graphdef, params, state)(IMAGES)[0]

    def both(params):
        y, pull = jax.vjp(logits, params)
        twice = jax.vjp(pull, jnp.zeros_like(y))[1]((params,))[0]
        return twice, jax.jvp(logits, (params,), (params,))[1]

    np.testing.assert_allclose(*jax.jit(both)(params), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_exported_for_every_batch_size(family):
    model = make(family)
    images = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8, 8, 1"), jnp.float32)
    exported = export.export(jax.jit(lambda images: model(images)[0]))(images)
    assert str(exported.out_avals[0].shape) == "(b, 4)"


def test_models_run_on_a_mesh_of_the_users_own():
    model = make("vit")
    expected = model(IMAGES)[0]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda images: model(images)[0])(IMAGES)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    spec = PartitionSpec("data")
    split = jax.shard_map(lambda x: model(x)[0], mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(split)(IMAGES), expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_remat_auto_recomputes_as_with_none(family):
    assert default_config(family)["remat"] == "auto"

    def gradient_program(**changes):
        model = make(family, **changes)
        return str(jax.make_jaxpr(jax.grad(lambda x: model(x)[0].sum()))(IMAGES))

    programs = (gradient_program(**c) for c in ({}, {"remat": "none"}, {"remat": "full"}))
    auto, none, full = (re.sub("0x[0-9a-f]+", "", text) for text in programs)
    assert auto == none != full


@pytest.mark.parametrize("family", FAMILIES)
def test_families_pass_unroll_and_remat_to_their_stacks(family):
    model = make(family, unroll=2, remat="full")
    program = str(jax.make_jaxpr(model)(IMAGES))
    assert "unroll=2" in program
    assert "nothing_saveable" in program


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_random_by_rng(family):
    runs = [train(family, rng, dtype="bfloat16") for rng in (1, 1, 2)]
    one, again, other = (out["pooled"].astype(jnp.float32) for (_, (_, out, _)), _ in runs)
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_draws_no_random_numbers(family):
    model = make(family)  # with drop path, and dropout in some
    assert "random_bits" not in str(jax.make_jaxpr(model)(IMAGES))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("vit", [[0, 0.5]]),
        ("swin", [[0, 0.25], [0.5]]),
        ("mixer", [[0.5, 0.5]]),
        ("convmixer", [[0, 0.5]]),
    ],
)
def test_drop_path_has_the_documented_rates(family, expected, monkeypatch):
    rates = []
    module = sys.modules[FAMILIES[family].__module__]

    def run_stack(*args, drop_path_rates, **options):
        rates.append(drop_path_rates.tolist())
        return model_lib.run_stack(*args, drop_path_rates=drop_path_rates, **options)

    monkeypatch.setattr(module, "run_stack", run_stack)
    jax.eval_shape(lambda images: make(family)(images)[0], IMAGES)
    assert rates == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_name_the_stacks(family):
    sites = make(family).sites()
    assert {name: type(site) for name, site in sites.items()} == SITES[family]
    abstract = nnx.eval_shape(lambda: make.__wrapped__(family)).sites()
    assert [s.num_layers for s in abstract.values()] == [s.num_layers for s in sites.values()]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("swin", "impulse_2024"),
        ("swin", "impulse_2025"),
        ("mixer", "impulse_2024"),
        ("mixer", "impulse_2025"),
        ("convmixer", "impulse_2025"),
        ("convmixer", "mimetic"),
    ],
)
def test_schemes_that_do_not_fit_a_model_are_refused(family, name):
    with pytest.raises(InputError, match=rf"name='{name}' .*use one of .*impulse"):
        make(family).initialize_attention(scheme_of(family, name), jax.random.key(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_default_config_agrees_with_the_constructor(family):
    config = default_config(family)
    assert config.pop("name") == family
    # Of `__init__`, because NNX gives the class a signature of `*args, **kwargs`.
    parameters = dict(inspect.signature(FAMILIES[family].__init__).parameters)
    for own in ("self", "channels", "attention_init", "rngs"):
        del parameters[own]
    assert parameters.keys() == config.keys()
    for field, parameter in parameters.items():
        assert parameter.default in (config[field], parameter.empty), field
    for changes in FAMILIES[family].VARIANTS.values():
        assert changes.keys() <= config.keys()


def test_variants_change_the_default_config_of_their_family():
    assert set(FAMILIES) == set(SIZES)
    for name, (family, changes) in VARIANTS.items():
        assert default_config(name) == default_config(family) | changes


def test_unknown_names_are_refused_with_similar_ones():
    with pytest.raises(InputError, match=r"model\.name='swin_tiny_224' .*: .* swin_tiny_patch4"):
        default_config("swin_tiny_224")
    with pytest.raises(InputError, match=r"model\.name='vit_tiny_patch16_224' is a variant"):
        make("vit", name="vit_tiny_patch16_224")


class OwnModel(Model):
    """A family outside the package: a linear model."""

    def __init__(self, *, image_size, channels, num_classes, rngs):
        self.head = nnx.Linear(image_size**2 * channels, num_classes, rngs=rngs)

    @staticmethod
    def default_config():
        return dict(num_classes=7)

    def sites(self):
        return {}

    def __call__(self, images, *, rng=None, with_maps=False):
        return self.head(images.reshape(len(images), -1)), {}


def test_a_class_of_the_users_own_is_a_family():
    options = default_config("test_models:OwnModel")
    assert options == {"name": "test_models:OwnModel", "num_classes": 7}
    model = create_model(options, image_size=8, channels=1, rngs=nnx.Rngs(params=0))
    assert model.initialize_attention(attention_init.default(), jax.random.key(0)) is None
    assert model(IMAGES)[0].shape == (8, 7)
    for name in ("test_models:make", "test_models:Nothing"):
        with pytest.raises(InputError, match=r"model\.name='test_models:"):
            default_config(name)


def test_the_default_config_of_a_variant_makes_it_at_its_size():
    make = functools.partial(create_model, default_config("vit_tiny_patch16_224"), channels=3)
    model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    assert model.grid == (14, 14)
    assert nnx.eval_shape(lambda: make(image_size=64, rngs=nnx.Rngs(0))).grid == (4, 4)
