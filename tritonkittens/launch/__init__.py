"""Kernel launches: cached TMA descriptors, and launches that take microseconds, also for plain `@triton.jit`
kernels."""

from .arguments import ArgType, GlobalArg
from .device import Device, capability, device_facts, l2_bytes, multiprocessor_count, shared_memory_per_block
from .im2col import Im2colSpec, check_im2col
from .launcher import Launcher
from .libcuda import CudaDriver, cuda_driver
from .native import signature_reader
from .plain import PlainKernel, plain_kernel, specialization
from .target import is_reachable, simulated_facts, simulator
from .tensormap import TensorMapSpec, check_tensor_map, encode, hardware_box
from .workspace import workspace

__all__ = [
    "ArgType",
    "CudaDriver",
    "Device",
    "GlobalArg",
    "Im2colSpec",
    "Launcher",
    "PlainKernel",
    "TensorMapSpec",
    "capability",
    "check_im2col",
    "check_tensor_map",
    "cuda_driver",
    "device_facts",
    "encode",
    "hardware_box",
    "is_reachable",
    "l2_bytes",
    "multiprocessor_count",
    "plain_kernel",
    "shared_memory_per_block",
    "signature_reader",
    "simulated_facts",
    "simulator",
    "specialization",
    "workspace",
]
