"""The tables of figures in the README and in docs/performance.md, from the committed results: `python -m
bench.figures`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

from bench.harness import RESULTS

SHAPES = {64: 32, 128: 16}  # head dimension: heads
BATCHES = {512: 32, 1024: 16, 4096: 4, 16384: 1}  # query length: batch, together 16 K tokens
FLASH = "best of cuDNN, FlashAttention-2 and -4"
SUITES = {  # file of results: what it measures, and the peers
    "gemm": ("GEMM bf16", "cuBLAS"),
    "gemm_fp8": ("GEMM e4m3, scales of a tensor, of rows and columns, of blocks", "`torch._scaled_mm`"),
    "gemm_epilogues": ("GEMM bf16 with fused epilogues", "torch, compiled or not"),
    "gemm_models": ("GEMM bf16, shapes of Llama-3 and DeepSeek-V3, ragged ones", "cuBLAS"),
    "gemm_random": ("GEMM bf16, random shapes that nobody tuned", "cuBLAS"),
    "gemm_fp8_random": ("GEMM e4m3, random shapes that nobody tuned", "`torch._scaled_mm`"),
    "gemm_training": ("Linear layers of Llama-3, forward and backward", "`torch.nn.Linear`"),
    "gemm_sustained": ("GEMM at the power limit", "cuBLAS, `torch._scaled_mm`"),
    "attention": ("attention forward", FLASH),
    "attention_backward": ("attention backward", FLASH),
    "attention_fp8": ("attention e4m3", f"bf16 of the {FLASH}"),
    "attention_sustained": ("attention at the power limit, both ways", FLASH),
    "attention_decode": ("attention of one query against a cache", FLASH),
    "attention_random": ("attention forward, random shapes that nobody tuned", FLASH),
    "attention_backward_random": ("attention backward, random shapes that nobody tuned", FLASH),
    "attention_decode_random": (
        "attention of few queries against a cache, random shapes",
        "best of cuDNN and FlashAttention-2",
    ),
    "attention_varlen": ("attention of packed sequences", "best of torch"),
    "grouped": ("products of groups, of mixtures of experts", "`torch._grouped_mm`"),
    "grouped_fp8": ("e4m3 products of groups", "`torch._scaled_grouped_mm`"),
    "grouped_swiglu": ("products of groups with SwiGLU", "`torch._grouped_mm`"),
    "norm": ("RMS and layer norm", "torch.compile, liger"),
    "norm_backward": ("backward of norms", "torch.compile, liger"),
    "rotary": ("rotary embedding", "torch.compile, liger"),
    "activation": ("SwiGLU and GeGLU", "torch.compile, liger"),
    "softmax": ("softmax", "torch.compile, liger"),
    "linear_cross_entropy": ("linear layer and cross entropy, forward and backward", "torch.compile, liger"),
    "linear_attention": ("linear attention", "fla"),
    "linear_attention_backward": ("backward of linear attention", "fla"),
    "gated_delta_rule": ("gated delta rule", "fla"),
    "gated_delta_rule_backward": ("backward of the gated delta rule", "fla"),
    "mamba_chunk_scan": ("Mamba-2's scan", "fla, without dt, D and z"),
    "mamba_chunk_scan_backward": ("backward of Mamba-2's scan", "fla, without dt, D and z"),
    "based": ("Based", "fla"),
    "fft_conv": ("FFT convolution", "torch.fft"),
    "fft_conv_backward": ("backward of FFT convolution", "torch.fft"),
    "attention_models": ("prefill and training of Llama and Qwen3 with our attention", "PyTorch's `sdpa`"),
    "blocks": ("prefill and training of blocks of Llama-3-8B and Qwen3-MoE on all our kernels", "torch.compile"),
}
README = (
    "gemm", "gemm_fp8", "gemm_epilogues", "gemm_models", "gemm_random", "gemm_training", "attention",
    "attention_backward", "attention_decode", "attention_random", "attention_varlen", "grouped", "norm",
    "linear_cross_entropy", "linear_attention", "gated_delta_rule", "mamba_chunk_scan", "fft_conv", "blocks",
)  # fmt: skip


def result(folder: pathlib.Path, suite: str) -> dict[str, Any]:
    return json.loads((folder / f"{suite}.json").read_text())


def overview(folder: pathlib.Path = RESULTS, suites: Iterable[str] = SUITES) -> str:
    """Each of these suites in a line of Markdown: how many times as fast as the best peer."""
    lines = ["| | cases | peer | times as fast | from, to |", "|---|---|---|---|---|"]
    for suite in suites:
        label, peer = SUITES[suite]
        measured = result(folder, suite)
        ours = measured["summary"]["tritonkittens"]
        highest = max(row["contenders"]["tritonkittens"].get("ratio", 0.0) for row in measured["rows"])
        lines.append(
            f"| {label} | {ours['rows']} | {peer} | {ours['geometric_mean']:.2f} | {ours['lowest']:.2f}, "
            f"{highest:.2f} |"
        )
    return "\n".join(lines)


Row = tuple[str, str, str]  # label, suite, case


def gemm_rows() -> list[Row]:
    squares = [
        (f"GEMM bf16 {side}³", "gemm", f"bf16 {side}x{side}x{side} NN") for side in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    depths = [(f"GEMM bf16 4096×4096×{k}", "gemm", f"bf16 4096x4096x{k} NN") for k in (256, 1024)]
    models = [
        ("GEMM bf16 16×14336×4096 (Llama-3 8B, decode)", "gemm_models", "Llama-3 8B gate, up: 16x14336x4096 NT"),
        ("GEMM bf16 1×8192×28672 (Llama-3 70B, decode)", "gemm_models", "Llama-3 70B down: 1x8192x28672 NT"),
        (
            "GEMM bf16 512×2048×7168 (DeepSeek-V3, an expert)",
            "gemm_models",
            "DeepSeek-V3 expert gate, up: 512x2048x7168 NT",
        ),
        (
            "GEMM bf16 64×4095×4097 (no row at a multiple of 16 bytes)",
            "gemm_models",
            "ragged 64x4095x4097: 64x4095x4097 NN",
        ),
        (
            "GEMM bf16 4095×4097×4103 (no row at a multiple of 16 bytes)",
            "gemm_models",
            "ragged 4095x4097x4103: 4095x4097x4103 NN",
        ),
        (
            "Linear 16384×50257×768 forward and backward (GPT-2's head)",
            "gemm_head",
            "GPT-2 head: 16384x50257x768 forward and backward",
        ),
    ]
    fp8 = [
        ("GEMM e4m3 4096³, a scale a tensor", "gemm_fp8", "e4m3 4096x4096x4096 scale per tensor"),
        ("GEMM e4m3 4096³, scales a row and column", "gemm_fp8", "e4m3 4096x4096x4096 scale per row"),
        ("GEMM e4m3 4096³, 128-block scales", "gemm_fp8", "e4m3 4096x4096x4096 scale per block"),
    ]
    epilogues = [
        (f"GEMM bf16 4096³ with {what}", "gemm_epilogues", f"bf16 4096³ {what}")
        for what in ("bias, gelu", "bias, silu", "residual + gate · (a·b + bias)")
    ]
    return squares + depths + models + fp8 + epilogues


def attention_rows() -> list[Row]:
    attention = [
        (
            f"attention {backward}{causal}D {d} S {s} B {batch} H {heads}",
            f"attention{'_backward' if backward else ''}",
            f"bf16 {causal}D {d} S {s} B {batch} H {heads}",
        )
        for backward in ("", "backward ")
        for d, heads in SHAPES.items()
        for causal in ("", "causal ")
        for s, batch in BATCHES.items()
        if not backward or s > 512
    ]
    e4m3 = [
        f"e4m3 {causal}D {d} S {s} B {BATCHES[s]} H {SHAPES[d]}"
        for d in SHAPES
        for causal in ("", "causal ")
        for s in (4096, 16384)
    ]
    fp8 = [(f"attention {case} (peer: bf16)", "attention_fp8", case) for case in e4m3]
    decode = [
        (f"attention decode {shape} (TB/s of K and V)", "attention_decode", f"bf16 decode {shape}")
        for shape in ("D 128 B 8 S 4096", "D 128 B 64 S 8192", "D 64 B 8 S 4096", "D 64 B 64 S 8192")
    ]
    return attention + fp8 + decode


def table(folder: pathlib.Path = RESULTS) -> str:
    """Some cases in Markdown. Raises KeyError for a case that the results do not have."""
    rows = gemm_rows() + attention_rows()
    results = {suite: result(folder, suite) for suite in dict.fromkeys(suite for _, suite, _ in rows)}
    cases = {(suite, row["case"]): row for suite, measured in results.items() for row in measured["rows"]}
    lines = ["| TFLOP/s | tritonkittens | best peer | ratio |", "|---|---|---|---|"]
    for label, suite, case in rows:
        row = cases[suite, case]
        ours, peer = row["contenders"]["tritonkittens"], row["contenders"][row["best_peer"]]
        figures = [figure(x["value"], results[suite]["unit"]) for x in (ours, peer)]
        lines.append(f"| {label} | {figures[0]} | {figures[1]} ({row['best_peer']}) | {ours['ratio']:.2f} |")
    return "\n".join(lines)


def ladder(folder: pathlib.Path = RESULTS) -> str:
    """The programs of `examples/` in Markdown, beside the shipped kernels and the best peer."""
    lines = [
        "| case | example | best peer | example, times as fast | shipped kernel, times as fast |",
        "|---|---|---|---|---|",
    ]
    for row in result(folder, "examples")["rows"]:
        cells, best = row["contenders"], row["best_peer"]
        rate = row["facts"]["rate"]
        found = [f"{figure(cells[name]['extra'][rate], rate)} {rate}" for name in ("example", best)]
        shipped = f"{cells['tritonkittens']['ratio']:.2f}" if "tritonkittens" in cells else ""
        lines.append(
            f"| {row['case']} | {found[0]} | {found[1]} ({best}) | {cells['example']['ratio']:.2f} | {shipped} |"
        )
    return "\n".join(lines)


def figure(value: float, unit: str) -> str:
    return f"{value:.2f}" if unit == "TB/s" else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    print(overview(), table(), ladder(), sep="\n\n")
