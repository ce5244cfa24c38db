"""Accelerators that a training step can be compiled for on a machine that has none of them.

The compilers are libtpu and JAX's CUDA plugin, which `pip install '.[targets]'` installs.
"""

import contextlib
import importlib
import os
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

from structinit_jax.errors import InputError

TPU_MEMORY = {"v4": 31.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}  # GiB per device for programs
FORMS = (
    "'tpu-' and the name of a slice, such as 'tpu-v5e:4x8' or 'tpu-v4:2x2x4', or 'h100' for one "
    "machine of 8 GPUs, 'h100:4x8' for four"
)
# What XLA has to know about an H100 SXM that is not there: a GpuTargetConfigProto.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
