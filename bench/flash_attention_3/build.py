"""Builds FlashAttention-3 as far as `python -m bench attention attention_backward` needs it, without a GPU and without torch's headers.

    python bench/flash_attention_3/build.py SOURCE CUTLASS CUDA OUT

SOURCE: the folder `hopper` of github.com/Dao-AILab/flash-attention; CUTLASS: `include` of the revision of NVIDIA/cutlass that its submodule names; CUDA: a
toolkit (of PyPI's wheels nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt, nvidia-cuda-cccl and nvidia-cuda-runtime, of one version and unzipped into one folder,
it is `nvidia/cu13`). OUT gets `libflash_attention_3.so` and `flash_attn_interface.py`; with OUT in PYTHONPATH the suites find the peer. Upstream's own build
has hundreds of kernels and takes hours; these are the ones of bf16, D 64 and 128, with and without a causal mask: 6 minutes on two cores.
"""
from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
LEFT_OUT = ("SPLIT", "PAGEDKV", "APPENDKV", "VARLEN", "LOCAL", "SOFTCAP", "PACKGQA", "FP16", "FP8", "HDIM96", "HDIM192", "HDIM256", "HDIMDIFF64", "HDIMDIFF192",
            "SM8x")  # fmt: skip
# those of `hopper/setup.py`
FLAGS = ["-O3", "-std=c++17", "--use_fast_math", "-DNDEBUG", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-DCUTLASS_ENABLE_GDC_FOR_SM90",
         "-DCUTLASS_DEBUG_TRACE_LEVEL=0", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-Xcompiler", "-fPIC",
         "-gencode", "arch=compute_90a,code=sm_90a", *(f"-DFLASHATTENTION_DISABLE_{name}" for name in LEFT_OUT)]  # fmt: skip


def build(source: pathlib.Path, cutlass: pathlib.Path, cuda: pathlib.Path, out: pathlib.Path) -> None:
    """Raises CalledProcessError where a file does not compile."""
    out.mkdir(parents=True, exist_ok=True)
    nvcc = [str(cuda / "bin" / "nvcc"), *FLAGS, f"-I{source}", f"-I{cutlass}", f"-I{cuda / 'include'}", f"-I{cuda / 'include' / 'cccl'}"]
    kernels = source / "instantiations"
    files = [*(kernels / f"flash_{kind}_hdim{dim}_bf16_sm90.cu" for kind in ("bwd", "fwd") for dim in (128, 64)), HERE / "launch.cu"]

    def compiled(file: pathlib.Path) -> str:
        begin, target = time.monotonic(), out / f"{file.stem}.o"
        subprocess.run([*nvcc, "-c", str(file), "-o", str(target)], check=True, env={**os.environ, "CUDA_HOME": str(cuda)})
        print(f"{file.name}: {time.monotonic() - begin:.0f} s", flush=True)
        return str(target)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, files))
    subprocess.run([nvcc[0], "-shared", f"-L{cuda / 'lib'}", "-cudart", "static", *objects, "-o", str(out / "libflash_attention_3.so")], check=True)
    for file in objects:
        os.remove(file)
    shutil.copy(HERE / "flash_attn_interface.py", out)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    build(*(pathlib.Path(path).resolve() for path in sys.argv[1:]))
