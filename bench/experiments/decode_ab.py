"""Variants of decoding in one process, beside cuDNN: TB/s, cuDNN's time by it. python decode_ab.py SECONDS; tree: HEAD with D.patch."""
import functools, os, random, statistics, sys, time
from unittest import mock
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
import tritonkittens.lang as tk
from tritonkittens.kernels.attention import attention_decode, decoding
from tritonkittens.kernels.attention.decode import AttentionDecode, AttentionDecodePaged
VARIANTS = {"base": {}, "ef": dict(policy="evict_first"), "rot": dict(rotates=True), "ef,rot": dict(policy="evict_first", rotates=True), "all": dict(all_slots=True), "all,ef": dict(all_slots=True, policy="evict_first"),
            "dyn": dict(schedule=tk.Dynamic()), "s64": dict(sub=64), "s32": dict(sub=32), "s16": dict(sub=16), "s32,ef": dict(sub=32, policy="evict_first"), "64": dict(cols=64), "64x2": dict(cols=64, blocks_per_sm=2), "64x2,ef": dict(cols=64, blocks_per_sm=2, policy="evict_first"), "64x2,all": dict(cols=64, blocks_per_sm=2, all_slots=True)}
def variant(more):
    def decode(dtype, head_dim, value_dim, causal, softcap, lengths=True, starts=False, page_size=None, row_tiles=1, partial=True, lse=True):
        make = AttentionDecode if page_size is None else functools.partial(AttentionDecodePaged, page_size=page_size)
        return make(**{**dict(dtype=tk.from_torch(dtype), head_dim=head_dim, value_dim=value_dim, causal=causal, softcap=softcap, lengths=lengths, starts=starts, row_tiles=row_tiles,
                              partial=partial, lse=lse, cols=128), **more})
    return functools.lru_cache(decode)
KINDS = {x: variant(m) for x, m in VARIANTS.items()}
if __name__ == "__main__":
    from bench import timing
    from bench.attention import in_pages
    CASES = [(64, 1024, None), (64, 8192, None), (8, 4096, None), (8, 32768, None), (8, 4096, 16), (64, 8192, 16)]
    each = float(sys.argv[1]) / len(CASES)
    for b, s, page in CASES:
        q = torch.randn(b, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(b, 8, s, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out, more = torch.empty_like(q), {}
        kk, vv = k, v
        if page:
            table = torch.randperm(b * -(-s // page), device="cuda").int().reshape(b, -1)
            more = dict(pages=table, lengths=torch.full((b,), s, dtype=torch.int32, device="cuda")); kk, vv = (in_pages(x, table, page) for x in (k, v))
        def ours(kind):
            def run():
                with mock.patch.object(decoding, "decode", kind): return attention_decode(q, kk, vv, out=out, **more)
            return run
        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        target = torch.empty_like(k)
        calls = {"cudnn": cudnn, "copy": lambda: target.copy_(k), **{x: ours(kind) for x, kind in KINDS.items()}}
        right, rounds = cudnn().float(), {}
        if page: calls = {x: c for x, c in calls.items() if not x.startswith('s')}
        for x in list(calls):
            try:
                got = calls[x]()
                if x != "copy" and (got.float() - right).abs().max() > 0.02: print("WRONG", b, s, page, x, flush=True)
                rounds[x] = timing.device(calls[x]) if x == "copy" else timing.reading(calls[x])
            except Exception as e: print(x, type(e).__name__, str(e)[:100], flush=True); calls.pop(x)
        times = {x: [] for x in rounds}; order = list(rounds); end = time.time() + each
        while time.time() < end:
            random.shuffle(order)
            for x in order: times[x].append(rounds[x]())
        bytes_ = 2 * k.numel() * 2
        print(f"B {b} S {s} pages {page} ({len(times['cudnn'])})", "  ".join(f"{x} {bytes_ / statistics.median(t) / 1e9:.3f} {statistics.median(p / o for p, o in zip(times['cudnn'], t)):.3f}" for x, t in times.items()), flush=True)
    sys.stdout.flush(); os._exit(0)
