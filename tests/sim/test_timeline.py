"""Timelines: what is recorded agrees with what ran and with the stated cost model, and the trace and the picture say
that time is modelled."""

import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import tritonkittens.lang as tk
from tests import cases_cluster
from tests.util import poison, relative_error
from tritonkittens import sim
from tritonkittens.arch import chip_of
from tritonkittens.kernels.attention import Config as AttentionConfig
from tritonkittens.kernels.attention import attention
from tritonkittens.kernels.gemm import Config, gemm, gemm_torch
from tritonkittens.sim import costs
from tritonkittens.sim.timeline import NOTE, Timeline

M = N = K = 256
CYCLES = 1e-6  # of rounding
TWO_CONSUMERS = AttentionConfig()


@pytest.fixture(scope="module")
def recorded():
    """A small GEMM and an attention, one launch each, on one timeline."""
    torch.manual_seed(int(os.environ["TRITONKITTENS_SEED"]))
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    q, k, v = (torch.randn(1, 1, 256, 64).bfloat16() for _ in range(3))
    timeline = Timeline()
    with sim.device("sm_90a", recorder=timeline) as device:
        out = poison(torch.empty(M, N, dtype=torch.bfloat16))
        gemm(a, b, out=out, config=Config())
        attention(q, k, v, config=TWO_CONSUMERS)
    assert relative_error(out, gemm_torch(a, b)) < 4e-3
    with sim.device("sm_90a") as plain:
        gemm(a, b, config=Config())
        attention(q, k, v, config=TWO_CONSUMERS)
    assert [x.simulation.time for x in device.launches] == [x.simulation.time for x in plain.launches], (
        "recording changes nothing"
    )
    return timeline, device.launches


def overlapping(intervals):
    ordered = sorted(intervals)
    return [(a, b) for a, b in zip(ordered, ordered[1:]) if b[0] < a[1] - CYCLES]


def test_lanes_hold_what_ran(recorded):
    timeline, launches = recorded
    for number, launch in enumerate(launches):
        ctas = [c for c in timeline.ctas if c.launch == number]
        assert len(ctas) == len(launch.simulation.finished) == launch.grid[0]
        assert max(c.end for c in ctas) == pytest.approx(launch.simulation.time)
        for cta in ctas:
            assert (
                cta.roles[0] == "consumer0"
                and {"consumer1", "producer"} < set(cta.roles)
                and cta.engines == ["TMA", "tensor core"]
            )
            spans = timeline.spans(cta)
            for role in cta.roles:
                mine = [(s.start, s.end) for s in spans if s.lane == role]
                assert mine and not overlapping(mine) and mine[0][0] >= 0
            for engine in cta.engines:
                assert not overlapping([s.busy for s in spans if s.lane == engine]), (
                    "an engine does one thing at a time"
                )
            for span in spans:
                assert span.kind in costs_kinds() and span.start <= span.end <= cta.end
                if span.busy:
                    assert span.start - CYCLES <= span.busy[0] <= span.busy[1] <= span.end + CYCLES


def costs_kinds():
    from tritonkittens.sim.timeline_picture import COLOURS

    return COLOURS


def test_copies_products_and_waits_of_a_gemm(recorded):
    timeline, (launch, _) = recorded
    spans = [s for c in timeline.ctas if c.launch == 0 for s in timeline.spans(c)]
    program = launch.program
    loads, stores, products = ([s for s in spans if s.kind == kind] for kind in ("load", "store", "tensor core"))
    # consumers of 64 rows take the rows of A, and each block its columns of B; all of C is stored
    a_bytes, b_bytes = (sum(s.args["bytes"] for s in loads if f"input.{which}[" in s.args["buffers"]) for which in "AB")
    tasks = launch.grid[0]
    assert sum(s.args["bytes"] for s in stores) == M * N * 2
    assert a_bytes == tasks * 128 * K * 2 and b_bytes == tasks * 256 * K * 2
    # the first stages are loaded before the roles begin, by the warps that become the first consumer
    assert {s.args["issued by"] for s in loads} == {"consumer0", "producer"} and {
        s.args["barrier"].split("[")[0] for s in loads
    } == {"input.full"}
    for stage in range(3):
        phases = [
            s.args["phase"]
            for s in loads
            if s.args["barrier"] == f"input.full[{stage}]" and s.cta is timeline.ctas[0] and "input.A" in s.name
        ]
        assert phases == list(range(len(phases)))
    busy = sum(s.busy[1] - s.busy[0] for s in products)
    assert busy == pytest.approx(M * N * K / 2048) and {s.args["issued by"] for s in products} == {
        "consumer0",
        "consumer1",
    }
    assert sum(s.busy[1] - s.busy[0] for s in loads) == pytest.approx((a_bytes + b_bytes) / chip_of(90).l2_bytes)
    assert all(s.end - s.start == pytest.approx(s.busy[1] - s.busy[0] + costs.TMA_LATENCY) for s in loads)
    waits = [s for s in spans if s.kind == "wait"]
    assert {"barrier", "phase", "parity", "for"} <= set(
        next(s for s in waits if s.lane == "consumer0" and "input.full" in s.name).args
    )
    assert all(s.end > s.start for s in waits)
    # a consumer's first product begins when its first stage is full, not before
    first = timeline.ctas[0]
    mine = timeline.spans(first)
    full = max(
        s.end for s in mine if s.kind == "load" and s.args["barrier"] == "input.full[0]" and s.args["phase"] == 0
    )
    assert min(s.start for s in mine if s.kind == "tensor core") >= full
    assert all("gemm.py:" in s.args["line"] for s in products)
    assert program.name in first.kernel


def test_consumers_share_the_special_functions(recorded):
    """exp2 of a tile takes its elements / 16 cycles, and two consumers together as long as one after the other."""
    timeline, (_, launch) = recorded
    exp2 = [
        s
        for steps in launch.program.steps.values()
        for s in steps
        if s.op.name == "math.exp2" and len(s.op.result_types[0].shape) == 2
    ]
    assert exp2 and all(
        s.cost.unit == "special functions" and s.cost.load == s.cost.cycles == np.prod(s.op.result_types[0].shape) / 16
        for s in exp2
    )
    for cta in (c for c in timeline.ctas if c.launch == 1):
        spans = [s for s in timeline.spans(cta) if s.kind == "special functions"]
        both = [sum(s.end - s.start for s in spans if s.lane == role) for role in ("consumer0", "consumer1")]
        machine = launch.simulation.finished[0]
        unit = machine.shared_units["special functions", 0]
        assert sum(b - a for a, b in zip(unit.starts, unit.ends)) <= sum(both) + CYCLES and min(both) > 0
        assert not overlapping(list(zip(unit.starts, unit.ends)))


def test_a_shared_unit_against_slots_of_one_cycle(rng):
    """First come first served, in pieces: each request takes the first free cycles from its time on."""
    unit, taken = costs.Unit(), set()
    for _ in range(300):
        at, load = int(rng.integers(0, 400)), int(rng.integers(1, 12))
        slots, t = [], at
        while len(slots) < load:
            if t not in taken:
                slots.append(t)
            t += 1
        taken |= set(slots)
        assert unit.take(at, load) == slots[-1] + 1
        covered = {c for a, b in zip(unit.starts, unit.ends) for c in range(int(a), int(b))}
        assert covered == taken and list(unit.starts) == sorted(unit.starts)
        assert all(a < b for a, b in zip(unit.starts, unit.ends)) and all(
            b <= c for b, c in zip(unit.ends, unit.starts[1:])
        )


def test_the_stated_rates():
    assert (
        costs.wgmma_cycles(64, 256, 16, 16) == 128
        and costs.wgmma_cycles(64, 256, 32, 8) == 128
        and costs.wgmma_cycles(64, 256, 8, 32) == 128
    )
    peak = 2 * costs.WGMMA_RATE * 132 * 1.83e9
    assert peak == pytest.approx(989.4e12, rel=1e-3)  # the data sheet of an H100 SXM, bf16, dense
    assert 2 * costs.TCGEN05_RATE * 148 * 1.85e9 == pytest.approx(2.25e15, rel=5e-3)  # and of a B200
    assert costs.HBM_BYTES * 132 * costs.CLOCK_GHZ == pytest.approx(4800, rel=1e-2)  # GB/s of an H200


def test_moves_and_what_a_vote_skips_cost_nothing():
    def cycles(text):
        op = SimpleNamespace(name="ttg.inline_asm", attributes={"asm_string": text}, result_types=(), operand_types=())
        return costs._assembly(op, 4, 1).cycles

    vote = "setp.neu.f32 p, $1, 0f3F800000; vote.sync.any.pred p, p, 0xffffffff;"
    assert cycles(vote) == 2 * costs.ISSUE
    assert cycles(f"{{ .reg .pred p; {vote} @!p bra SAME; mul.f32 $0, $0, $1; SAME: }}") <= 2 * costs.ISSUE
    assert cycles("mov.b64 x, {$1, $2}; add.rn.f32x2 x, x, y; mov.b64 {$1, $2}, x;") == costs.ISSUE


def test_trace(recorded, tmp_path):
    timeline, launches = recorded
    timeline.save(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    assert NOTE == "modelled, not measured" and NOTE in trace["otherData"]["time"]
    names, rows = {}, defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            names.setdefault(event["name"], {})[event["pid"], event.get("tid")] = event["args"].get("name")
            continue
        assert event["ph"] == "X" and event["dur"] >= 0 and event["args"]["time"] == NOTE and event["name"]
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    processes = names["process_name"]
    assert len(processes) == len(timeline.ctas) and all(NOTE in n and "CTA (" in n for n in processes.values())
    assert set(rows) <= set(names["thread_name"]) and {"consumer0", "producer", "TMA 0", "TMA 1"} <= set(
        names["thread_name"].values()
    )
    assert not any(b[0] < a[1] - 1e-9 for mine in rows.values() for a, b in zip(sorted(mine), sorted(mine)[1:]))
    # launches follow each other; 1.7 GHz
    ends = [
        max(e for (pid, _), mine in rows.items() if timeline.ctas[pid].launch == n for _, e in mine) for n in range(2)
    ]
    starts = [
        min(b for (pid, _), mine in rows.items() if timeline.ctas[pid].launch == n for b, _ in mine) for n in range(2)
    ]
    assert ends[0] == pytest.approx(launches[0].simulation.time / 1700) and starts[1] >= ends[0] - 1e-9
    assert ends[1] - ends[0] == pytest.approx(launches[1].simulation.time / 1700)
    counted = Counter(e.get("cat") for e in trace["traceEvents"])
    assert (
        counted["wait"]
        and counted["load"]
        and counted["store"]
        and counted["tensor core"]
        and counted["special functions"]
    )


def test_picture(recorded, tmp_path, monkeypatch):
    timeline, launches = recorded
    timeline.draw(tmp_path / "t.svg", launch=0)
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in root.iter(f"{space}text")]
    of = "" if launches[0].grid[0] == 1 else f", 1 of {launches[0].grid[0]} CTAs"
    # where so short a product spends most of its time
    assert texts[0] == f"template_kernel of result.py{of}: {NOTE}" and "cycles (modelled)" in texts
    assert {"consumer0", "consumer1", "producer", "TMA", "tensor core", "wait", "TMA or cp.async load"} <= set(texts)
    width = float(root.get("width"))
    boxes = [r for r in root.iter(f"{space}rect") if r.find(f"{space}title") is not None]
    assert all(0 <= float(r.get("x")) and float(r.get("x")) + float(r.get("width")) <= width for r in boxes)
    assert sum(r.get("fill") == "url(#waits)" for r in boxes) == sum(
        s.kind == "wait" for s in timeline.spans(timeline.ctas[0])
    )
    timeline.draw(tmp_path / "part.svg", launch=1, ctas=2, cycles=(1000, 3000), title="softmax <&>")
    part = ElementTree.parse(tmp_path / "part.svg").getroot()
    assert [t.text for t in part.iter(f"{space}text")][0].startswith("softmax <&>")
    with pytest.raises(ValueError, match="picture is .svg or .png"):
        timeline.draw(tmp_path / "t.pdf")
    with pytest.raises(ValueError, match="nothing was recorded"):
        Timeline().draw(tmp_path / "t.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match="needs matplotlib"):
        timeline.draw(tmp_path / "t.png")


def test_png(recorded, tmp_path):
    pytest.importorskip("matplotlib")
    recorded[0].draw(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_summary(recorded):
    timeline, _ = recorded
    shares = timeline.summary()
    assert len(shares) == sum(len(c.lanes) for c in timeline.ctas)
    for share in shares:
        assert (
            share.busy + share.wait + share.idle == pytest.approx(1.0)
            and min(share.busy, share.wait) >= 0
            and NOTE in str(share)
        )
    core = next(s for s in shares if s.launch == 0 and s.lane == "tensor core")
    tiles = M * N * K / timeline.ctas[0].end / 2048 / sum(c.launch == 0 for c in timeline.ctas)
    assert core.busy == pytest.approx(tiles)


@gluon.jit
def stuck(out):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.wait(bar, 0)
    gl.store(out, 1)


def test_a_run_that_never_ends_well_and_clusters_left_out(tmp_path):
    timeline = Timeline(clusters=1)
    out = torch.zeros(1, dtype=torch.int32)
    launch = sim.run(stuck, (3,), out, num_warps=4, recorder=timeline, raise_findings=False)
    assert [f.kind for f in launch.findings] == ["deadlock"] and out.item() == 0
    (last,) = [s for s in timeline.spans(timeline.ctas[0]) if s.kind == "wait"]
    assert (
        last.args["unfinished"] == "still waiting when the run ended"
        and last.args["barrier"] == "bar"
        and "mbarrier.wait(bar, 0)" in last.args["line"]
    )
    timeline.draw(tmp_path / "t.svg")
    assert "waits for bar" in (tmp_path / "t.svg").read_text()

    timeline = Timeline(clusters=1)
    with sim.device("sm_90a", recorder=timeline):
        attention(*(torch.randn(1, 2, 256, 64).bfloat16() for _ in range(3)))
    assert (
        len(timeline.ctas) == 1
        and timeline.left_out
        and timeline.trace()["otherData"]["CTAs left out"] == len(timeline.left_out)
    )
    timeline.draw(tmp_path / "t.svg")
    assert f"1 of {1 + len(timeline.left_out)} CTAs" in (tmp_path / "t.svg").read_text()


def test_each_cta_of_a_cluster_has_its_own_lanes_and_engines(tmp_path):
    """Multicast between two blocks: a process for each rank, and a TMA of its own that the other's copies do not
    delay."""
    tile = tk.st(tk.fp32, 48, 64)
    x = torch.randn(96, 64)
    y = poison(torch.empty(4 * 48, 64))
    timeline = Timeline()
    with sim.device("sm_90a", recorder=timeline):
        cases_cluster.shared_loads[(1,)](tk.gl(x, tile), tk.gl(y), tile, cluster_size=2)
    assert torch.equal(y, x.repeat(2, 1))
    assert [c.name.rsplit(" ", 2)[-2:] for c in timeline.ctas] == [["rank", "0"], ["rank", "1"]]
    first = [next(s for s in timeline.spans(c) if s.lane == "TMA") for c in timeline.ctas]
    assert all(s.start == s.args["issued at cycle"] for s in first)
    timeline.draw(tmp_path / "t.svg", ctas=2)
    assert "rank 1" in (tmp_path / "t.svg").read_text()
