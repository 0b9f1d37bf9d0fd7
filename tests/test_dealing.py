"""How `attention_decode` deals sequences out: what is chosen, and what that was worth on the GPUs."""

import json
import statistics

import pytest
import torch

from bench.decode_deals import DEALS, GPUS, Shape, deals_of, regrets, report, write
from tritonkittens.kernels.attention.dealing import Deal, Kind, Ring, Rings, deal_of, decode, rings_of, row_tiles_of


def test_tiles_have_equally_many_heads():
    groups = {(8, 8): (1, 8), (8, 9): (2, 4), (8, 16): (2, 4), (24, 5): (2, 12), (71, 1): (2, 36), (1, 64): (1, 1), (3, 64): (3, 1), (5, 31): (3, 2)}
    assert {group: row_tiles_of(*group) for group in groups} == groups


H200, H100 = (132, 4.8e12), (132, 3.35e12)  # multiprocessors, bytes of memory a second
OF = {  # by thread blocks a multiprocessor
    64: {0: Ring(64, 256, 3, 2), 1: Ring(128, 256, 3, 1), 3: Ring(64, 256, 2, 3), 4: Ring(32, 256, 3, 4)},
    128: {0: Ring(64, 512, 2, 2), 1: Ring(64, 512, 3, 1)},
}
SHARED = {64: Ring(128, 256, 3, 1), 128: Ring(64, 512, 3, 1)}
EVEN = {64: (0, 3), 128: (0,)}
RINGS = {dim: Rings(tuple(of.items()), SHARED[dim], dim, tuple((count, of[count]) for count in EVEN[dim])) for dim, of in OF.items()}


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dim", RINGS)
def test_rings_are_those_of_kernels(dim, page_size):
    def read(ring):
        return ring._replace(in_pages=page_size is not None)

    kind = Kind(torch.bfloat16, dim, dim, page_size=page_size)
    expected = {count: read(ring) for count, ring in OF[dim].items()}
    assert rings_of(kind) == (tuple(expected.items()), read(SHARED[dim]), dim, tuple((count, expected[count]) for count in EVEN[dim]))
    assert rings_of(kind, whole=False) == (((0, expected[0]), (1, expected[1])), None, dim, ()), "TMA stores parts alone, which need more room"


def test_rings_of_other_dimensions():
    assert {n: [count for count, _ in rings_of(Kind(torch.bfloat16, n, n)).of] for n in (16, 96, 192, 256)} == {
        16: [0, 1, 3, 4], 96: [0, 1, 3], 192: [0, 1], 256: [0, 1]
    }  # fmt: skip
    assert [n for n in range(16, 257, 16) if rings_of(Kind(torch.bfloat16, 64, n)).shared] == [32, 64, 128, 256], "halves are tiles, of at least 16 columns"


@pytest.mark.parametrize("page_size, alone, in_cluster", [(None, False, False), (16, True, True), (48, True, True), (32, True, True), (64, False, True),
                                                          (128, False, False)])  # fmt: skip
def test_values_have_a_producer_where_a_block_takes_several_copies(page_size, alone, in_cluster):
    """Blocks of 64 keys, in clusters of 128."""
    for sharers, several in ((1, alone), (2, in_cluster)):
        told = decode(Kind(torch.bfloat16, 64, 64, page_size=page_size), partial=False, sharers=sharers).explain()
        assert ("a warp of its own loads lagged tiles" in told) == several


@pytest.mark.parametrize("dim", RINGS)
def test_parts_fill_the_device(dim):
    assert deal_of(264, 4096, *H200, RINGS[dim]) == Deal(), "enough tasks"
    assert deal_of(1, 64, *H200, RINGS[dim]).parts == 1, "a single block of keys"
    for tasks, keys in ((8, 8192), (8, 65536), (16, 32768), (3, 1 << 20)):
        for device in (H200, H100):
            parts, sharers, at_once, _ = deal_of(tasks, keys, *device, RINGS[dim])
            most = 132 if at_once == 1 else 0.98 * 264
            assert sharers == 1 and 84 <= tasks * parts <= most, "multiprocessors read, and a second kernel finds room beside them"
    few, many = (deal_of(16, 1 << 14, *device, RINGS[64]).parts for device in (H100, H200))
    assert few < many, "fewer thread blocks read as fast as a slower memory gives"


@pytest.mark.parametrize("dim", RINGS)
def test_clusters_fill_the_device(dim):
    assert deal_of(64, 4096, *H200, RINGS[dim]) == Deal(1, 2)
    assert deal_of(64, 256, *H200, RINGS[dim]).sharers == 1, "where tasks are short, joining them takes longer"
    assert deal_of(8, 65536, *H200, RINGS[dim]).sharers == 1, "where they are few, there are more parts than blocks of a cluster"
    assert [deal_of(64, 4096, *H200, RINGS[dim]._replace(columns=n)).sharers for n in (16, 32)] == [1, 2], "each block gets at least 16 columns"


def test_crowds_fill_the_device_once():
    """A few tasks more than two thread blocks a multiprocessor: with three of them there is no second round. Many short ones: four hide each other's ends."""
    assert [deal_of(tasks, 3000, *H200, RINGS[64]).at_once for tasks in (264, 272, 384)] == [0, 3, 3]
    assert deal_of(1024, 137, *H200, RINGS[64]) == Deal(at_once=4)


def test_long_tasks_that_not_every_multiprocessor_can_have_are_split():
    """Beside one or two whole ones on each, where that spares more than finding out takes, and where there is room for parts of each."""
    shapes = [(64, 272, 4096), (64, 272, 1024), (64, 264, 4096), (64, 360, 4096), (128, 136, 4096), (128, 136, 1024), (128, 272, 4096), (128, 100, 4096)]
    assert [shape for shape in shapes if deal_of(*shape[1:], *H200, RINGS[shape[0]]).even] == [(64, 272, 4096), (128, 136, 4096), (128, 136, 1024)]
    assert all(deal == Deal(1, 1, deal.at_once, True) for deal in (deal_of(272, 4096, *H200, RINGS[64]), deal_of(136, 4096, *H200, RINGS[128])))


def test_pages_and_longer_rings_count():
    """Where pages are asked for first a thread block takes longer, and more of them, or longer rings, are worth more."""
    paged = {count: ring._replace(in_pages=True) for count, ring in OF[128].items()}

    def dealt(tasks, keys, *counts, rings):
        return deal_of(tasks, keys, *H200, Rings(tuple((count, rings[count]) for count in counts)))

    assert dealt(8, 8192, 0, 1, rings=paged).at_once == 1 and dealt(8, 8192, 0, 1, rings=OF[128]).at_once == 0
    assert dealt(1, 65536, 0, rings=paged).parts > dealt(1, 65536, 0, rings=OF[128]).parts


@pytest.mark.parametrize("gpu", GPUS)
def test_what_is_chosen_was_among_the_fastest(gpu):
    """Of the deals measured on the H200 and the H100, to which the constants were fitted."""
    rows = json.loads(DEALS.read_text())["rows"][gpu]
    lost = [regret for _, _, regret in regrets(rows, gpu)]
    assert len(rows) > 150 and min(lost) == 0
    assert statistics.mean(lost) < 0.009 and max(lost) < 0.12


def test_measured_deals_are_written_and_reported(tmp_path, capsys):
    shape = Shape(64, None, 8, 4096)
    deals = deals_of(shape, GPUS["H200"])
    assert {Deal(1), Deal(2), Deal(1, 2), Deal(2, at_once=1), Deal(at_once=3)} <= set(deals) and len(set(deals)) == len(deals)
    row = dict(shape=list(shape), peers={}, deals=[[*deal, 20.0 if deal == Deal(1, 2) else 25.0] for deal in deals])
    write({"info": {}, "rows": {"H200": [row]}}, tmp_path / "deals.json")
    results = json.loads((tmp_path / "deals.json").read_text())
    assert results["rows"]["H200"] == [row]
    assert list(regrets([row], "H200")) == [(shape, Deal(1, 2), 0.0)]
    report(results)
    assert f"H200: 1 shapes, {len(deals)} deals; the chosen take 0.00% longer" in capsys.readouterr().out
