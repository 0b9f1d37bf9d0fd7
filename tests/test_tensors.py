"""What the PyTorch entry points share: allocations that are torch's, and signatures that tell calls apart."""

import pytest
import torch

from tritonkittens.kernels._tensors import allocator, remember, signature


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (0, 4), (4, 0), (2, 1, 7), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_allocations_are_those_of_torch(shape, dtype):
    allocate, like = allocator(shape, dtype, torch.device("cpu")), torch.empty(shape, dtype=dtype)
    first, second = allocate(), allocate()
    for x in (first, second):
        assert (x.shape, x.stride(), x.dtype, x.device) == (like.shape, like.stride(), like.dtype, like.device)
    assert first.numel() == 0 or first.data_ptr() != second.data_ptr()


def test_allocations_where_torch_has_no_faster_entry(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    x = allocator((3, 5), torch.float16, torch.device("cpu"))()
    assert (x.shape, x.stride(), x.dtype) == ((3, 5), (5, 1), torch.float16)


def test_nothing_of_a_captured_graph_is_remembered(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    memo = {}
    for capturing, expected in ((True, {}), (False, {"kind": "plan"})):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert remember(memo, "kind", "plan") == "plan" and memo == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_signatures_tell_tensors_apart(count):
    base = torch.zeros(64, 72, dtype=torch.bfloat16)[:, :64]
    others = {
        "shape": base[:63],
        "strides": base.contiguous(),
        "transposed": base.mT,
        "dtype": torch.zeros(64, 72, dtype=torch.float16)[:, :64],
        "address": torch.zeros(64 * 72 + 1, dtype=torch.bfloat16)[1:].view(64, 72)[:, :64],
    }
    again, same = torch.ones(64, 72, dtype=torch.bfloat16)[:, :64], signature(*[base] * count)
    for position in range(count):
        assert signature(*[again if i == position else base for i in range(count)]) == same
        for name, other in others.items():
            assert signature(*[other if i == position else base for i in range(count)]) != same, name
