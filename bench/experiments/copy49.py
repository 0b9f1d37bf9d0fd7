"""Copies between rows of any alignment: torch's copy_, elements, words."""
import torch, triton, triton.language as tl, sys


@triton.jit(do_not_specialize=["x_pitch", "y_pitch"], do_not_specialize_on_alignment=["X", "Y"])
def by_elements(X, Y, rows, cols, x_pitch, y_pitch, ROWS: tl.constexpr, COLS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (r < rows) & (c < cols)
    tl.store(Y + (r * y_pitch + c), tl.load(X + (r * x_pitch + c), mask=inside), mask=inside)


@triton.jit(do_not_specialize=["x_pitch", "y_pitch"], do_not_specialize_on_alignment=["X", "Y"])
def by_words(X, Y, rows, cols, x_pitch, y_pitch, ROWS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr):
    PER: tl.constexpr = 8 // SIZE
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    x, y = X + r * x_pitch, Y + r * y_pitch
    head = (-(y.to(tl.int64) // SIZE)) & (PER - 1)
    n = (cols - head) // PER
    start = x.to(tl.int64) + head * SIZE
    shift = start & 7
    source = (start - shift).to(tl.pointer_type(tl.uint64))
    i = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
    inside = (r < rows) & (i < n)
    low = tl.load(source + i, mask=inside, other=0)
    high = tl.load(source + i + 1, mask=inside & (shift > 0), other=0)
    bits = (8 * shift).to(tl.uint64)
    word = (low >> bits) | ((high << 1) << (63 - bits))
    tl.store((y + head).to(tl.pointer_type(tl.uint64)) + i, word, mask=inside)
    if tl.program_id(1) == 0:
        e = tl.arange(0, 16)[None, :]
        c = tl.where(e < 8, e, head + n * PER + e - 8)
        edge = (r < rows) & (c < cols) & ((e >= 8) | (e < head))
        tl.store(y + c, tl.load(x + c, mask=edge), mask=edge)


def pitched(rows, cols, dtype, step):
    per = step // dtype.itemsize if step else 1
    return torch.empty(rows, -(-cols // per) * per, dtype=dtype, device="cuda")[:, :cols]


def timed(f, sets, rounds=5, reps=12):
    out = []
    for _ in range(rounds):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for s in sets: f(*s)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)
        a.record()
        for j in range(reps): f(*sets[j % len(sets)])
        b.record(); torch.cuda.synchronize()
        out.append(a.elapsed_time(b) / reps * 1e3)
    return sorted(out)[rounds // 2]


ways = {"torch": lambda x, y: y.copy_(x)}
for R, C, w in ((1, 1024, 4), (2, 1024, 4), (4, 512, 4), (4, 1024, 8), (8, 512, 8), (8, 512, 4), (16, 256, 8)):
    def f(x, y, R=R, C=C, w=w):
        by_elements[(triton.cdiv(x.shape[0], R), triton.cdiv(x.shape[1], C))](x, y, *x.shape, x.stride(0), y.stride(0), ROWS=R, COLS=C, num_warps=w)
    ways[f"elements {R}x{C} {w}"] = f
for R, C, w in ((1, 512, 4), (1, 1024, 4), (2, 512, 4), (4, 256, 4), (4, 512, 8), (8, 128, 4), (8, 256, 8), (2, 256, 4)):
    def f(x, y, R=R, C=C, w=w):
        xi, yi = (t.view(torch.int16 if t.element_size() == 2 else torch.int8 if t.element_size() == 1 else torch.int32) for t in (x, y))
        by_words[(triton.cdiv(x.shape[0], R), triton.cdiv(x.shape[1], C * 8 // x.element_size()))](xi, yi, *x.shape, x.stride(0), y.stride(0), ROWS=R, WORDS=C, SIZE=x.element_size(), num_warps=w)
    ways[f"words {R}x{C} {w}"] = f

if __name__ == "__main__":
    for rows, cols in ((4095, 4103), (16384, 50257), (1000, 1001), (50257, 771)):
        for direction in ("in", "out"):
            n = 1 if rows * cols > 1e8 else 4
            sets = []
            for _ in range(n):
                x, y = pitched(rows, cols, torch.bfloat16, 0), pitched(rows, cols, torch.bfloat16, 128)
                x.normal_(); y.normal_()
                sets.append((x, y) if direction == "in" else (y, x))
            print(f"{rows}x{cols} {direction}")
            for name, f in ways.items():
                try:
                    sets[0][1].zero_(); f(*sets[0]); torch.cuda.synchronize()
                    ok = torch.equal(*sets[0])
                    us = timed(f, sets)
                    print(f"  {name:24} {us:8.1f} us  {2 * rows * cols * 2 / us / 1e6:6.2f} TB/s {'' if ok else 'WRONG'}", flush=True)
                except Exception as e:
                    print("  ", name, type(e).__name__, str(e)[:200], flush=True)
