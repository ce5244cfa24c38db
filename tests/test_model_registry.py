"""Model families and variants by name."""

import functools

import jax
import pytest
from flax import nnx
from tiny_models import IMAGES, SIZES, make

from structinit_jax import attention_init
from structinit_jax.errors import InputError
from structinit_jax.models import FAMILIES, VARIANTS, create_model, default_config


def test_variants_change_the_default_config_of_their_family():
    assert set(FAMILIES) == set(SIZES)
    for name, (family, changes) in VARIANTS.items():
        assert default_config(name) == default_config(family) | changes


def test_unknown_names_are_refused_with_similar_ones():
    with pytest.raises(InputError, match=r"model\.name='swin_tiny_224' is unknown: did you mean"):
        default_config("swin_tiny_224")
    with pytest.raises(InputError, match=r"model\.name='vit_tiny_patch16_224' is a variant"):
        make("vit", name="vit_tiny_patch16_224")


def test_a_class_of_the_users_own_is_a_family():
    options = default_config("tiny_models:OwnModel")
    assert options == {"name": "tiny_models:OwnModel", "num_classes": 7}
    model = create_model(options, image_size=8, channels=1, rngs=nnx.Rngs(params=0))
    assert model.initialize_attention(attention_init.default(), jax.random.key(0)) is None
    assert model(IMAGES)[0].shape == (8, 7)
    for name in ("tiny_models:make", "tiny_models:Nothing"):
        with pytest.raises(InputError, match=r"model\.name='tiny_models:"):
            default_config(name)


def test_the_default_config_of_a_variant_makes_it_at_its_size():
    make = functools.partial(create_model, default_config("vit_tiny_patch16_224"), channels=3)
    model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    assert model.grid == (14, 14)
    assert nnx.eval_shape(lambda: make(image_size=64, rngs=nnx.Rngs(0))).grid == (4, 4)
