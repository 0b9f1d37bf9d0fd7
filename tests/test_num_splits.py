"""The split heuristic of `attention_decode`: what it chooses, and what the choice was worth on the GPUs."""

import json
import statistics

import pytest
import torch

from bench.decode_splits import GPUS, SPLITS, Shape, regrets, report, splits_of, write
from tritonkittens.kernels.attention.num_splits import (
    DecodeKind,
    DecodeSplit,
    Ring,
    Rings,
    choose_split,
    decode_kernel,
    rings_of,
    row_tiles_of,
)


def test_tiles_have_equally_many_heads():
    groups = {
        (8, 8): (1, 8),
        (8, 9): (2, 4),
        (8, 16): (2, 4),
        (24, 5): (2, 12),
        (71, 1): (2, 36),
        (1, 64): (1, 1),
        (3, 64): (3, 1),
        (5, 31): (3, 2),
    }
    assert {group: row_tiles_of(*group) for group in groups} == groups


H200, H100 = (132, 4.8e12), (132, 3.35e12)  # multiprocessors, bytes of memory a second
OF = {  # by thread blocks a multiprocessor
    64: {0: Ring(64, 256, 3, 2), 1: Ring(128, 256, 3, 1), 3: Ring(64, 256, 2, 3), 4: Ring(32, 256, 3, 4)},
    128: {0: Ring(64, 512, 2, 2), 1: Ring(64, 512, 3, 1)},
}
SHARED = {64: Ring(128, 256, 3, 1), 128: Ring(64, 512, 3, 1)}
EVEN = {64: (0, 3), 128: (0,)}
RINGS = {
    dim: Rings(tuple(of.items()), SHARED[dim], dim, tuple((count, of[count]) for count in EVEN[dim]))
    for dim, of in OF.items()
}


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dim", RINGS)
def test_rings_are_those_of_kernels(dim, page_size):
    def read(ring):
        return ring._replace(paged=page_size is not None)

    kind = DecodeKind(torch.bfloat16, dim, dim, page_size=page_size)
    expected = {count: read(ring) for count, ring in OF[dim].items()}
    assert rings_of(kind) == (
        tuple(expected.items()),
        read(SHARED[dim]),
        dim,
        tuple((count, expected[count]) for count in EVEN[dim]),
    )
    assert rings_of(kind, whole=False) == (((0, expected[0]), (1, expected[1])), None, dim, ()), (
        "TMA stores splits alone, which need more room"
    )


def test_rings_of_other_dimensions():
    assert {
        n: [count for count, _ in rings_of(DecodeKind(torch.bfloat16, n, n)).plain] for n in (16, 96, 192, 256)
    } == {16: [0, 1, 3, 4], 96: [0, 1, 3], 192: [0, 1], 256: [0, 1]}
    in_cluster = [n for n in range(16, 257, 16) if rings_of(DecodeKind(torch.bfloat16, 64, n)).cluster]
    assert in_cluster == [32, 64, 128, 256], "halves are tiles of at least 16 columns"


@pytest.mark.parametrize(
    "page_size, alone, in_cluster",
    [
        (None, False, False),
        (16, True, True),
        (48, True, True),
        (32, True, True),
        (64, False, True),
        (128, False, False),
    ],
)
def test_values_have_a_producer_where_a_block_takes_several_copies(page_size, alone, in_cluster):
    """Blocks of 64 keys, in clusters of 128."""
    for cluster, several in ((1, alone), (2, in_cluster)):
        explained = decode_kernel(
            DecodeKind(torch.bfloat16, 64, 64, page_size=page_size), partial=False, cluster=cluster
        ).explain()
        assert ("a warp of its own loads lagged tiles" in explained) == several


@pytest.mark.parametrize("dim", RINGS)
def test_splits_fill_the_device(dim):
    assert choose_split(264, 4096, *H200, RINGS[dim]) == DecodeSplit(), "enough tasks"
    assert choose_split(1, 64, *H200, RINGS[dim]).num_splits == 1, "a single block of keys"
    for tasks, keys in ((8, 8192), (8, 65536), (16, 32768), (3, 1 << 20)):
        for device in (H200, H100):
            num_splits, cluster, blocks_per_sm, _ = choose_split(tasks, keys, *device, RINGS[dim])
            most = 132 if blocks_per_sm == 1 else 0.98 * 264
            assert cluster == 1 and 84 <= tasks * num_splits <= most, (
                "multiprocessors read, and a second kernel finds room beside them"
            )
    few, many = (choose_split(16, 1 << 14, *device, RINGS[64]).num_splits for device in (H100, H200))
    assert few < many, "fewer thread blocks read as fast as a slower memory gives"


@pytest.mark.parametrize("dim", RINGS)
def test_clusters_fill_the_device(dim):
    assert choose_split(64, 4096, *H200, RINGS[dim]) == DecodeSplit(1, 2)
    assert choose_split(64, 256, *H200, RINGS[dim]).cluster == 1, "where tasks are short, merging results takes longer"
    assert choose_split(8, 65536, *H200, RINGS[dim]).cluster == 1, (
        "where they are few, there are more splits than CTAs of a cluster"
    )
    assert [choose_split(64, 4096, *H200, RINGS[dim]._replace(columns=n)).cluster for n in (16, 32)] == [1, 2], (
        "each CTA gets at least 16 columns"
    )


def test_crowds_fill_the_device_once():
    """A few tasks more than two thread blocks a multiprocessor: with three of them there is no second round. Many short
    ones: four hide each other's ends."""
    assert [choose_split(tasks, 3000, *H200, RINGS[64]).blocks_per_sm for tasks in (264, 272, 384)] == [0, 3, 3]
    assert choose_split(1024, 137, *H200, RINGS[64]) == DecodeSplit(blocks_per_sm=4)


def test_long_tasks_of_an_incomplete_wave_are_split():
    """Each SM has one or two whole tasks and room for a part of another, and the shorter wave outweighs the cost of a
    split."""
    shapes = [
        (64, 272, 4096),
        (64, 272, 1024),
        (64, 264, 4096),
        (64, 360, 4096),
        (128, 136, 4096),
        (128, 136, 1024),
        (128, 272, 4096),
        (128, 100, 4096),
    ]
    assert [shape for shape in shapes if choose_split(*shape[1:], *H200, RINGS[shape[0]]).split_rest] == [
        (64, 272, 4096),
        (128, 136, 4096),
        (128, 136, 1024),
    ]
    found = choose_split(272, 4096, *H200, RINGS[64]), choose_split(136, 4096, *H200, RINGS[128])
    assert all(split == DecodeSplit(1, 1, split.blocks_per_sm, True) for split in found)


def test_pages_and_longer_rings_count():
    """Where pages are asked for first a thread block takes longer, and more of them, or longer rings, are worth
    more."""
    paged = {count: ring._replace(paged=True) for count, ring in OF[128].items()}

    def chosen(tasks, keys, *counts, rings):
        return choose_split(tasks, keys, *H200, Rings(tuple((count, rings[count]) for count in counts)))

    assert (
        chosen(8, 8192, 0, 1, rings=paged).blocks_per_sm == 1
        and chosen(8, 8192, 0, 1, rings=OF[128]).blocks_per_sm == 0
    )
    assert chosen(1, 65536, 0, rings=paged).num_splits > chosen(1, 65536, 0, rings=OF[128]).num_splits


@pytest.mark.parametrize("gpu", GPUS)
def test_what_is_chosen_was_among_the_fastest(gpu):
    """Of the splits measured on the H200 and the H100, to which the constants were fitted."""
    rows = json.loads(SPLITS.read_text())["rows"][gpu]
    lost = [regret for _, _, regret in regrets(rows, gpu)]
    assert len(rows) > 150 and min(lost) == 0
    assert statistics.mean(lost) < 0.009 and max(lost) < 0.12


def test_measured_splits_are_written_and_reported(tmp_path, capsys):
    shape = Shape(64, None, 8, 4096)
    splits = splits_of(shape, GPUS["H200"])
    expected = {
        DecodeSplit(1),
        DecodeSplit(2),
        DecodeSplit(1, 2),
        DecodeSplit(2, blocks_per_sm=1),
        DecodeSplit(blocks_per_sm=3),
    }
    assert expected <= set(splits) and len(set(splits)) == len(splits)
    row = dict(
        shape=list(shape), peers={}, splits=[[*split, 20.0 if split == DecodeSplit(1, 2) else 25.0] for split in splits]
    )
    write({"info": {}, "rows": {"H200": [row]}}, tmp_path / "splits.json")
    results = json.loads((tmp_path / "splits.json").read_text())
    assert results["rows"]["H200"] == [row]
    assert list(regrets([row], "H200")) == [(shape, DecodeSplit(1, 2), 0.0)]
    report(results)
    assert f"H200: 1 shapes, {len(splits)} splits; the chosen take 0.00% longer" in capsys.readouterr().out
