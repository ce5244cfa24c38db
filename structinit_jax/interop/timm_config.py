"""Describes our models to timm: arguments of `create_model`, and the card of a folder."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from structinit_jax.errors import InputError
from structinit_jax.models.convmixer import ConvMixer
from structinit_jax.models.mixer import MlpMixer


class TimmModel(NamedTuple):
    """A model of timm.

    Attributes:
      name: Name for `timm.create_model`; or its class, 'timm.models.mlp_mixer.MlpMixer', where
        timm's named models fix the sizes.
      arguments: Keyword arguments.
    """

    name: str
    arguments: dict[str, Any]

    @property
    def is_registered(self) -> bool:
        """Whether `timm.create_model` can build it."""
        return "." not in self.name

    def call(self) -> str:
        """Returns the Python expression that builds it."""
        texts = [f"{name}={value!r}" for name, value in self.arguments.items()]
        if not self.is_registered:
            return f"{self.name}({', '.join(texts)})"
        if None in self.arguments.values():  # `create_model` drops arguments that are None
            return f"timm.model_entrypoint({self.name!r})({', '.join(texts)})"
        return f"timm.create_model({', '.join([repr(self.name), *texts])})"

    def card(
        self,
        *,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        crop_fraction: float,
        class_names: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Returns the `config.json` of a folder for `timm.create_model("local-dir:FOLDER")`.

        Args:
          image_size: Side of the images in pixels.
          mean: Mean of the normalization, by channel.
          std: Standard deviation of the normalization, by channel.
          crop_fraction: See `data.crops.resize_and_center_crop`.
          class_names: Name of each class, if they are known.
        """
        num_classes = self.arguments["num_classes"]
        family = self.name.split("_")[0]
        return {
            "architecture": self.name,
            "num_classes": num_classes,
            "model_args": self.arguments,
            **({"label_names": list(class_names)} if class_names else {}),
            "pretrained_cfg": {
                "input_size": [self.arguments["in_chans"], image_size, image_size],
                "fixed_input_size": family != "convmixer",
                "interpolation": "bicubic",
                "crop_pct": crop_fraction,
                "mean": list(mean),
                "std": list(std),
                "num_classes": num_classes,
                "first_conv": _FIRST_CONV.get(family, "patch_embed.proj"),
                "classifier": "head.fc" if family == "swin" else "head",
            },
        }


def timm_model(model: Mapping[str, Any], *, image_size: int, channels: int) -> TimmModel:
    """Returns timm's equivalent of a model.

    Args:
      model: `config.model`.
      image_size: Side of the images in pixels.
      channels: Input channels.

    Raises:
      InputError: timm has no such family.
    """
    if model["name"] not in _FAMILIES:
        raise InputError(
            f"config.model.name={model['name']!r} cannot be exported, since timm has only "
            f"{', '.join(_FAMILIES)}: structinit_jax.evaluate.restore_model(config, workdir) "
            "returns the weights of any model in Python"
        )
    common = dict(in_chans=channels, num_classes=model["num_classes"])
    return _FAMILIES[model["name"]](model, common, dict(img_size=image_size))


def _vit(model, common, size):
    by_token = model["pool"] == "class_token"
    arguments = dict(
        patch_size=model["patch_size"],
        embed_dim=model["width"],
        depth=model["depth"],
        num_heads=model["num_heads"],
        mlp_ratio=model["mlp_ratio"],
        class_token=by_token,
        global_pool="token" if by_token else "avg",
        qk_norm=model["qk_norm"],
    )
    registers, scale = model["num_registers"], model["layer_scale"]
    if model["positions"] == "rope":
        arguments |= dict(num_reg_tokens=registers, init_values=scale or None)
        return TimmModel("vit_small_patch16_rope_224", common | size | arguments)
    arguments |= dict(reg_tokens=registers, **({"init_values": scale} if scale else {}))
    return TimmModel("vit_base_patch16_224", common | size | arguments)


def _swin(model, common, size):
    arguments = dict(
        patch_size=model["patch_size"],
        embed_dim=model["width"],
        depths=list(model["depths"]),
        num_heads=list(model["num_heads"]),
        window_size=model["window_size"],
        mlp_ratio=model["mlp_ratio"],
    )
    return TimmModel("swin_tiny_patch4_window7_224", common | size | arguments)


def _mixer(model, common, size):
    common = common | size | dict(mlp_ratio=[model["token_mlp_ratio"], model["mlp_ratio"]])
    if name := _variant(MlpMixer, model, ("patch_size", "width", "depth")):
        return TimmModel(name, common)
    sizes = dict(
        patch_size=model["patch_size"], embed_dim=model["width"], num_blocks=model["depth"]
    )
    return TimmModel("timm.models.mlp_mixer.MlpMixer", common | sizes)


def _convmixer(model, common, _):
    fields = ("patch_size", "width", "depth", "kernel_size", "activation")
    name = _variant(ConvMixer, model, fields)
    if name in ("convmixer_768_32", "convmixer_1024_20_ks9_p14", "convmixer_1536_20"):
        return TimmModel(name, common)
    sizes = dict(
        patch_size=model["patch_size"],
        dim=model["width"],
        depth=model["depth"],
        kernel_size=model["kernel_size"],
        act_layer=_Expression(
            {"gelu": "torch.nn.GELU", "relu": "torch.nn.ReLU"}[model["activation"]]
        ),
    )
    return TimmModel("timm.models.convmixer.ConvMixer", common | sizes)


def _variant(family, model, fields):
    """Returns the name of the variant with these fields, or None."""
    for name, changes in family.VARIANTS.items():
        options = family.default_config() | changes
        if all(options[field] == model[field] for field in fields):
            return name
    return None


class _Expression(str):
    """A Python expression among the arguments."""

    __repr__ = str.__str__


_FAMILIES = {"vit": _vit, "swin": _swin, "mixer": _mixer, "convmixer": _convmixer}
_FIRST_CONV = {"mixer": "stem.proj", "convmixer": "stem.0"}
