"""FLOPs of a model and the peak speed of devices.

Model FLOPs utilization (MFU; Chowdhery et al. 2022, PaLM, appendix B) counts the products that the
model needs, not those that the program executes: rematerialization and augmentation lower it.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from ml_collections import ConfigDict

from structinit_jax.models.registry import create_model

# Peak FLOP/s of one JAX device for dense bfloat16 products (float16 on V100 and T4, which lack
# bfloat16), by `device_kind`. Exact names: those of partitions of a GPU start with its name.
PEAK = {
    # https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and its pages on each version.
    "TPU v2": 46e12 / 2,  # a device is one of the chip's two cores
    "TPU v3": 123e12 / 2,  # as above
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,  # v5e
    "TPU v5": 459e12,  # v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,  # v6e
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
    # https://www.nvidia.com/en-us/data-center/tesla-t4
    "Tesla T4": 65e12,
    # https://www.nvidia.com/en-us/data-center/l4; halved: with sparsity, as those below
    "NVIDIA L4": 242e12 / 2,
    # https://www.nvidia.com/en-us/data-center/a100 (without sparsity)
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    "NVIDIA H100 PCIe": 1513e12 / 2,
    "NVIDIA H100 NVL": 1671e12 / 2,
    "NVIDIA H100 80GB HBM3": 1979e12 / 2,
    # https://www.nvidia.com/en-us/data-center/h200
    "NVIDIA H200 NVL": 1671e12 / 2,
    "NVIDIA H200": 1979e12 / 2,
}


def peak_speed(config: ConfigDict, mesh: jax.sharding.Mesh) -> float | None:
    """Returns training images per second at the devices' peak, or None if that is unknown."""
    peak = PEAK.get(mesh.devices.flat[0].device_kind)
    return peak and peak * mesh.size / flops_per_image(config)


def flops_per_image(config: ConfigDict) -> float:
    """Counts the FLOPs of matrix products and convolutions for one training image.

    The backward pass has two products, the gradients of the factors, for each one of the forward
    pass.
    """
    options = config.model.to_dict()
    if "attention_implementation" in options:
        options["attention_implementation"] = "auto"  # products in a fused kernel are not visible
    size, channels = config.data.image_size, config.data.channels
    graphdef, state = nnx.split(
        nnx.eval_shape(
            lambda: create_model(options, image_size=size, channels=channels, rngs=nnx.Rngs(0))
        )
    )

    def forward(state, image):
        return nnx.merge(graphdef, state)(image)[0]

    image = jax.ShapeDtypeStruct((1, size, size, channels), jnp.float32)
    return 3 * count(jax.make_jaxpr(forward)(state, image).jaxpr)


def count(jaxpr: Jaxpr) -> float:
    """Counts the FLOPs of matrix products and convolutions of a traced function.

    The body of a scan counts as often as it runs, that of a while loop once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            lhs = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(lhs[i] for i in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
            total += 2 * equation.outvars[0].aval.size * math.prod(kernel) / outputs
        else:
            times = params["length"] if equation.primitive.name == "scan" else 1
            total += times * sum(map(count, _inner_jaxprs(params)))
    return total


def _inner_jaxprs(params: dict) -> Iterator[Jaxpr]:
    for value in params.values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, ClosedJaxpr | Jaxpr):
                yield getattr(part, "jaxpr", part)
