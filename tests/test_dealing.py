"""How `attention_decode` deals sequences out: what is chosen, and what that was worth on the GPUs."""

import json
import statistics

import pytest
import torch

from bench.decode_deals import GPUS, RESULTS, Shape, deals_of, regrets, report, write
from tritonkittens.kernels.attention.dealing import Deal, Kind, Ring, deal_of, rings_of, row_tiles_of


def test_tiles_have_equally_many_heads():
    groups = {(8, 8): (1, 8), (8, 9): (2, 4), (8, 16): (2, 4), (24, 5): (2, 12), (71, 1): (2, 36), (1, 64): (1, 1), (3, 64): (3, 1), (5, 31): (3, 2)}
    assert {group: row_tiles_of(*group) for group in groups} == groups


H200, H100 = (132, 4.8e12), (132, 3.35e12)  # multiprocessors, bytes of memory a second
RINGS = {64: (Ring(64, 256, 3, 2), Ring(128, 256, 3, 1), Ring(64, 256, 4, 1)), 128: (Ring(64, 512, 2, 2), Ring(64, 512, 3, 1), Ring(64, 512, 3, 1))}


@pytest.mark.parametrize("page_size", [None, 16])
def test_rings_are_those_of_kernels(page_size):
    for dim, rings in RINGS.items():
        copies = [0 if page_size is None else ring.keys // page_size for ring in rings]
        expected = tuple(ring._replace(copies=n) for ring, n in zip(rings, copies, strict=True))
        assert rings_of(Kind(torch.bfloat16, dim, dim, page_size=page_size)) == expected
        assert rings_of(Kind(torch.bfloat16, dim, dim, page_size=page_size), whole=False) == (*expected[:2], None)
    assert rings_of(Kind(torch.bfloat16, 96, 96))[2] is None


@pytest.mark.parametrize("dim", RINGS)
def test_parts_fill_the_device(dim):
    assert deal_of(264, 4096, *H200, *RINGS[dim], dim) == Deal(), "enough tasks"
    assert deal_of(1, 64, *H200, *RINGS[dim], dim) == Deal(), "a single block of keys"
    for tasks, keys in ((8, 8192), (8, 65536), (16, 32768), (3, 1 << 20)):
        for device in (H200, H100):
            parts, sharers, alone = deal_of(tasks, keys, *device, *RINGS[dim], dim)
            assert sharers == 1 and 84 <= tasks * parts < (124 if alone else 0.98 * 264), "multiprocessors read, and a second kernel finds room beside them"
    few, many = (deal_of(32, 1 << 16, *device, *RINGS[64], 64).parts for device in (H100, H200))
    assert few < many, "fewer thread blocks read as fast as a slower memory gives"


@pytest.mark.parametrize("dim", RINGS)
def test_clusters_fill_the_device(dim):
    assert deal_of(64, 4096, *H200, *RINGS[dim], dim) == Deal(1, 2)
    assert deal_of(64, 256, *H200, *RINGS[dim], dim).sharers == 1, "where tasks are short, joining them takes longer"
    assert deal_of(8, 65536, *H200, *RINGS[dim], dim).sharers == 1, "where they are few, there are more parts than blocks of a cluster"
    assert [deal_of(64, 4096, *H200, *RINGS[dim], n).sharers for n in (16, 32)] == [1, 2], "each block gets at least 16 columns"


def test_copies_and_longer_rings_count():
    """In copies of 16 keys a thread block takes longer, and more of them, or longer rings, are worth more."""
    ring, alone, _ = RINGS[128]
    assert deal_of(8, 65536, *H200, ring, alone._replace(copies=4)) == deal_of(8, 65536, *H200, ring), "alone there is nothing to gain for what asks for enough"
    copied = deal_of(8, 65536, *H200, ring._replace(copies=4), alone._replace(copies=4))
    assert copied.alone and deal_of(8, 65536, *H200, ring._replace(copies=4)).parts > copied.parts


@pytest.mark.parametrize("gpu", GPUS)
def test_what_is_chosen_was_among_the_fastest(gpu):
    """Of the deals measured on the H200 and the H100, to which the constants were fitted."""
    rows = json.loads(RESULTS.read_text())["rows"][gpu]
    lost = [regret for _, _, regret in regrets(rows, gpu)]
    assert len(rows) > 150 and min(lost) == 0
    assert statistics.mean(lost) < 0.009 and max(lost) < 0.12


def test_measured_deals_are_written_and_reported(tmp_path, capsys):
    shape = Shape(64, None, 8, 4096)
    deals = deals_of(shape, GPUS["H200"])
    assert {Deal(1), Deal(2), Deal(1, 2), Deal(2, alone=True)} <= set(deals) and len(set(deals)) == len(deals)
    row = dict(shape=list(shape), peers={}, deals=[[*deal, 20.0 if deal == Deal(1, 2) else 25.0] for deal in deals])
    write({"info": {}, "rows": {"H200": [row]}}, tmp_path / "deals.json")
    results = json.loads((tmp_path / "deals.json").read_text())
    assert results["rows"]["H200"] == [row]
    assert list(regrets([row], "H200")) == [(shape, Deal(1, 2), 0.0)]
    report(results)
    assert f"H200: 1 shapes, {len(deals)} deals; the chosen take 0.00% longer" in capsys.readouterr().out
