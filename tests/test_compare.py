"""`python -m bench.compare` with processes that answer without a GPU: the figure of a row, its repeats, and the
verdict."""

import itertools
import json
import subprocess
import sys

import pytest

from bench import compare


class Answering:
    """A revision whose calls take these milliseconds, ours and the peer's, in turn; a case named "broken" does not
    run."""

    def __init__(self, ours, peer, cases=("a", "b")):
        self.times = {"ours": itertools.cycle(ours), "peer": itertools.cycle(peer) if peer else None}
        self.names, self.asked, self.pending = cases, [], None

    def ask(self, *request):
        self.pending = request

    def answer(self):
        return self.call(*self.pending)

    def call(self, method, argument):
        self.asked.append((method, argument))
        if method == "cases":
            return list(self.names)
        if method == "prepare":
            if argument == "broken":
                raise RuntimeError("no kernel")
            return {"ours": "x", "peer": "cublas"}
        times = self.times[argument]
        return None if times is None else next(times)


def pair(this, other, peer=(2.0,), **more):
    return {"this": Answering(this, peer, **more), "other": Answering(other, peer)}


def options(**given):
    return compare.parse(["tree", "gemm", *(f"--{name}={value}" for name, value in given.items())])


def test_a_row_is_how_much_longer_this_revision_takes_in_the_same_round():
    found = compare.measured(pair([1.03, 2.06, 1.03], [1.0, 2.0, 1.0]), 6)  # a clock that drifts hits both
    assert found["percent"] == pytest.approx(3.0) and found["peer"] == 0.0
    assert found["us"] == {"this ours": 1030.0, "other ours": 1000.0, "this peer": 2000.0, "other peer": 2000.0}
    assert compare.measured(pair([1.0], [1.0], None), 4)["peer"] is None


def test_a_row_over_the_limit_is_measured_three_times_with_operands_in_other_memory():
    revisions = pair([1.05], [1.0])
    found = list(compare.rows(revisions, "gemm", options(rounds=2)))
    assert [row["all"] for row in found] == [[5.0] * 3] * 2 and [row["percent"] for row in found] == [5.0, 5.0]
    assert revisions["this"].asked.count(("prepare", "a")) == 3
    steady = pair([1.01], [1.0])
    assert [row["all"] for row in compare.rows(steady, "gemm", options(rounds=2))] == [[1.0]] * 2 and steady[
        "this"
    ].asked.count(("prepare", "a")) == 1


def test_a_peer_that_differs_shows_that_the_measurement_is_worth_nothing():
    assert not compare.is_steady({"percent": 0.0, "peer": -3.0}, 2.0) and not compare.is_steady(
        {"percent": 2.1, "peer": 0.0}, 2.0
    )
    assert compare.is_steady({"percent": -5.0, "peer": None}, 2.0)


def test_only_cases_that_both_have_are_compared_and_parts_of_them():
    revisions = pair([1.0], [1.0], cases=("a", "new", "b"))
    assert [row["case"] for row in compare.rows(revisions, "gemm", options(rounds=2))] == ["a", "b"]
    halves = compare.parse(["tree", "gemm", "--rounds", "2", "--part", "1", "2"])
    assert [row["case"] for row in compare.rows(revisions, "gemm", halves)] == ["b"]


def test_the_verdict_names_rows_over_the_limit_and_those_that_fail_in_one_revision():
    rows = [
        {"case": "a", "percent": 0.2},
        {"case": "b", "percent": 2.5},
        {"case": "c", "failed": {"this": "no kernel"}},
    ]
    text, good = compare.verdict("gemm", rows, 2.0)
    assert (
        not good
        and text.startswith("gemm: +1.34 % over 2 rows")
        and "over 2.0 %: b" in text
        and "fails in one revision: c" in text
    )
    assert compare.verdict("gemm", [{"case": "a", "percent": 0.2}], 2.0) == ("gemm: +0.20 % over 1 rows", True)
    assert not compare.verdict("gemm", [{"case": "a", "percent": 0.6}], 2.0)[1]  # the mean
    assert compare.verdict("gemm", [{"case": "a", "failed": {"this": "x", "other": "x"}}], 2.0)[1]


def test_a_case_that_does_not_run_is_a_row_with_the_reason():
    revisions = {"this": Answering([1.0], [1.0], ("broken",)), "other": Answering([1.0], [1.0], ("broken",))}
    assert list(compare.rows(revisions, "gemm", options())) == [
        {"case": "broken", "failed": {"this": "no kernel", "other": "no kernel"}}
    ]


def test_a_process_serves_the_cases_of_its_own_revision():
    revision = compare.Revision(compare.HERE)
    cases = revision.call("cases", "gemm")
    assert "bf16 4096x4096x4096 NN" in cases
    with pytest.raises(RuntimeError, match="KeyError"):
        revision.call("cases", "no suite")
    revision.process.stdin.close()
    assert revision.process.wait(timeout=60) == 0


def test_without_arguments_the_command_says_what_it_takes():
    done = subprocess.run([sys.executable, "-m", "bench.compare"], capture_output=True, text=True, cwd=compare.HERE)
    assert done.returncode == 2 and "tree" in done.stderr
    assert json.dumps(options().part) == "[0, 1]"
