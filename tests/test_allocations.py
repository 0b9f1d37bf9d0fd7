"""Allocations name their dtype and device, so that nothing depends on `torch.set_default_dtype` and
`torch.set_default_device`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OF_DEFAULT_DTYPE = {"empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
OF_NUMBERS = {"arange", "randint", "randperm", "tensor"}  # whose dtype is that of their arguments


def unnamed(source: str) -> list[str]:
    """Lines whose calls of torch's factories leave the dtype or the device to the process."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "torch"
        ):
            continue
        needed = (
            {"dtype", "device"}
            if node.func.attr in OF_DEFAULT_DTYPE
            else {"device"}
            if node.func.attr in OF_NUMBERS
            else set()
        )
        named = {keyword.arg for keyword in node.keywords}
        if None not in named and not needed <= named:  # None: a dictionary of keywords
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("folder", ["tritonkittens", "kernels", "examples", "bench"])
def test_allocations_name_dtype_and_device(folder):
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if "tritonkittens/kernels" not in path.as_posix()]
    assert files
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in files for line in unnamed(path.read_text())]


def test_an_allocation_without_a_dtype_is_found():
    named = ["x.new_empty(3)", "torch.zeros(3, dtype=torch.int8, device='cpu')", "torch.arange(4, device='cpu')"]
    missing = ["torch.empty(3, device='cpu')", "torch.ones(2, dtype=torch.int8)", "torch.arange(4)"]
    assert unnamed("\n".join(named + missing)) == [f"{number}: {line}" for number, line in enumerate(missing, 4)]
