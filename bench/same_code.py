"""Does a change leave the machine code of the shipped kernels as it was? `python -m bench.same_code REVISION [--only
GLOB] [--arch ARCH…] [--jobs N]`.

Compiles every kernel of `python -m tritonkittens inspect` twice, from a git revision and from the working tree, and
compares instructions, registers, memory, constants and launch attributes. Names, files and lines do not count, so that
renaming or moving a function is no difference. Needs no GPU.

Prints one line for each kernel that differs, and a summary. Kernels that one revision alone has are listed. The exit
status is 1 where a kernel differs, also where one revision refuses to compile it and the other does not; with --strict
also where one revision alone has it. --show NAME prints how the instructions of one kernel differ. What is compiled of
committed files is kept in ~/.cache/tritonkittens/same_code ($TK_CACHE_DIR), also where a run is interrupted, for all
commits whose packages are the same; of uncommitted changes nothing is kept.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import difflib
import fnmatch
import hashlib
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton
from triton import knobs

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORKER = pathlib.Path(__file__).resolve().parent / "machine_code.py"
ARCHITECTURES = ("sm_90a", "sm_100a")
PACKAGES = ("tritonkittens", "kernels")  # what the machine code is made of
FORMAT = 1  # of what is kept
SHOWN_LINES = 40
COMPARED = ("instructions", "registers", "shared", "warps", "tensor memory")  # numbers that a line shows
Key = tuple[str, str]  # kernel, architecture
Kernels = dict[Key, dict[str, Any]]


# ---------------------------------------------------------------- revisions


class Revision:
    """The kernels of one state of the repository, of which `root` has the files and `jobs` processes compile.
    `identity`: of its packages, None where they are not committed."""

    def __init__(self, root: pathlib.Path, identity: str | None, jobs: int):
        self.root, self.identity = root, identity
        self.workers = [Worker(root) for _ in range(jobs)]

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.close()

    @property
    def kept(self) -> pathlib.Path | None:
        """The folder in which what is compiled is kept."""
        folder = os.path.expanduser(os.environ.get("TK_CACHE_DIR") or "~/.cache/tritonkittens")
        return (
            None
            if self.identity is None
            else pathlib.Path(folder, "same_code", self.identity, f"triton-{triton.__version__}-{FORMAT}")
        )

    def load(self, key: str) -> Any:
        """What is kept under `key`, None for nothing."""
        path = self.kept and self.kept / f"{key}.json"
        return json.loads(path.read_text()) if path and path.exists() else None

    def keep(self, key: str, value: Any) -> None:
        if self.kept is None:
            return
        self.kept.mkdir(parents=True, exist_ok=True)
        # another process may read it meanwhile
        with tempfile.NamedTemporaryFile("w", dir=self.kept, delete=False) as file:
            json.dump(value, file)
        os.replace(file.name, self.kept / f"{key}.json")


def git(root: pathlib.Path, *arguments: str) -> str:
    """Raises SystemExit with git's message where it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"same_code: git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def checked_out(root: pathlib.Path, revision: str, jobs: int) -> Iterator[Revision]:
    """A revision's files in a temporary folder."""
    commit = git(root, "rev-parse", "--verify", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="same_code_") as folder:
        archive = subprocess.run(["git", "-C", str(root), "archive", commit], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        identity = hashlib.sha256(git(root, "ls-tree", commit, *PACKAGES).encode()).hexdigest()[:40]
        with contextlib.closing(Revision(pathlib.Path(folder), identity, jobs)) as found:
            yield found


@contextlib.contextmanager
def working_tree(root: pathlib.Path, jobs: int) -> Iterator[Revision]:
    """The files as they are; where git sees no change of the packages, a copy of the commit's, so that nobody's next
    edit is kept as that commit's code."""
    if git(root, "status", "--porcelain", "--", *PACKAGES):
        with contextlib.closing(Revision(root, None, jobs)) as found:
            yield found
    else:
        with checked_out(root, "HEAD", jobs) as found:
            yield found


# ---------------------------------------------------------------- compilation


class Worker:
    """A process that compiles kernels of one revision, one at a time, with a compile cache of its own. What compilers
    say of kernels that they refuse stays in a file."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.folder = tempfile.TemporaryDirectory(prefix="same_code_cache_")
        self.process: subprocess.Popen[str] | None = None
        self.is_closed = False

    @property
    def messages(self) -> pathlib.Path:
        return pathlib.Path(self.folder.name, "messages")

    def ask(self, request: str) -> Any:
        """The answer to a request; None where the process died of it."""
        if self.process is None or self.process.poll() is not None:
            environment = os.environ | dict(
                PYTHONPATH=str(self.root),
                TRITON_CACHE_DIR=self.folder.name,
                TK_CACHE_DIR=self.folder.name,
                OMP_NUM_THREADS="1",
            )
            with self.messages.open("a") as messages:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", str(WORKER), str(self.root)],
                    cwd=self.root,
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                )
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(request, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End the process, also in the middle of a kernel."""
        self.is_closed = True
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


def names_of(revision: Revision) -> list[str]:
    """The kernels that a revision has. Raises SystemExit where its package cannot be imported."""
    names = revision.load("names")
    if names is None:
        names = revision.workers[0].ask("NAMES")
        if names is None:
            last = revision.workers[0].messages.read_text().strip().splitlines()[-1:]
            raise SystemExit(f"same_code: the kernels of {revision.root} cannot be listed: {' '.join(last)}")
        revision.keep("names", names)
    return names


def compiled(revision: Revision, keys: list[Key]) -> Kernels:
    """What became of kernels: kept of before, or compiled now."""
    found: Kernels = {key: known for key in keys if (known := revision.load(".".join(key)))}
    waiting: queue.SimpleQueue[Key] = queue.SimpleQueue()
    for key in keys:
        if key not in found:
            waiting.put(key)

    def work(worker: Worker) -> None:
        while True:
            try:
                key = waiting.get_nowait()
            except queue.Empty:
                return
            answer = worker.ask(" ".join(key))
            if worker.is_closed:  # the run was interrupted
                return
            found[key] = answer or {"refused": "the compiler crashed"}
            if answer:  # a crash may be for want of memory
                revision.keep(".".join(key), answer)

    threads = [
        threading.Thread(target=work, args=(worker,), daemon=True) for worker in revision.workers[: waiting.qsize()]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# ---------------------------------------------------------------- comparison


@dataclass
class Comparison:
    """Kernels of two revisions: how many are the same or refused by both, and what differs, a line each."""

    same: int = 0
    refused: int = 0
    differing: dict[Key, str] = field(default_factory=dict)
    only_here: list[str] = field(default_factory=list)
    only_there: list[str] = field(default_factory=list)

    def summary(self) -> str:
        parts = f"same {self.same}, differ {len(self.differing)}, refused {self.refused}"
        return f"{parts}, only here {len(self.only_here)}, only there {len(self.only_there)}"

    def is_failure(self, strict: bool) -> bool:
        return bool(self.differing or (strict and (self.only_here or self.only_there)))


def difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """What differs between two answers of a worker, "" for nothing."""
    if "refused" in there or "refused" in here:
        states = [answer.get("refused", "compiles") for answer in (there, here)]
        return "" if "compiles" not in states else " → ".join(states)
    parts = [f"{name} {there[name]} → {here[name]}" for name in COMPARED if there[name] != here[name]]
    if not parts and there["code digest"] != here["code digest"]:
        parts = [f"other instructions, {here['instructions']} as before"]
    if not parts and there["constants and attributes"] != here["constants and attributes"]:
        parts = ["constants or attributes"]
    return ", ".join(parts)


def compared(there: Kernels, here: Kernels) -> Comparison:
    """The comparison of kernels that both revisions have."""
    result = Comparison()
    for key in there:
        if line := difference(there[key], here[key]):
            result.differing[key] = line
        elif "refused" in here[key]:
            result.refused += 1
        else:
            result.same += 1
    return result


# ---------------------------------------------------------------- how instructions differ


def instructions(answer: dict[str, Any], arch: str) -> list[str]:
    """A kernel's instructions as text, with numbers of labels instead of addresses."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(zlib.decompress(base64.b64decode(answer["code"])))
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--binary", arch.replace("sm_", "SM"), file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return with_labels(text)


def with_labels(text: str) -> list[str]:
    """Lines of nvdisasm without their addresses; an address that an instruction names becomes a label, counted from the
    first, so that it stays where instructions are put in before it."""
    found = re.findall(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;", text, re.MULTILINE)
    places = {int(address, 16) for address, _ in found}
    named = {
        int(target, 16) for _, line in found for target in re.findall(r"\b0x([0-9a-f]+)\b", line) if _is_jump(line)
    } & places
    label = {address: f"L{number}" for number, address in enumerate(sorted(named))}
    lines = []
    for address, line in found:
        if int(address, 16) in label:
            lines.append(f"{label[int(address, 16)]}:")
        if _is_jump(line):
            line = re.sub(r"\b0x([0-9a-f]+)\b", lambda match: label.get(int(match[1], 16), match[0]), line)
        lines.append(f"    {line}")
    return lines


def _is_jump(line: str) -> bool:
    """Does an instruction name an address of code?"""
    return re.search(r"\b(BRA|BSSY|BREAK|CALL|RET|WARPSYNC|JMP|BRX)\b", line) is not None


def shown(there: dict[str, Any], here: dict[str, Any], arch: str) -> list[str]:
    """The first lines of how the instructions of two answers differ."""
    if "refused" in there or "refused" in here:
        return [difference(there, here) or here["refused"]]
    diff = difflib.unified_diff(instructions(there, arch), instructions(here, arch), "there", "here", lineterm="")
    return list(diff)[:SHOWN_LINES]


# ---------------------------------------------------------------- the command


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.same_code", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", metavar="REVISION", help="a git revision to compare the working tree with")
    parser.add_argument(
        "--arch", nargs="+", default=ARCHITECTURES, metavar="ARCH", help=f"default: {' '.join(ARCHITECTURES)}"
    )
    parser.add_argument("--only", default="*", metavar="GLOB", help="kernels with such names: 'gemm_deferred*'")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that compile (default: one a CPU)"
    )
    parser.add_argument("--strict", action="store_true", help="fail where one revision alone has a kernel")
    parser.add_argument("--show", metavar="NAME", help="print how the instructions of this kernel differ")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: it takes at least one process")
    return options


def compare(there: Revision, here: Revision, options: argparse.Namespace) -> int:
    """Compile, compare and print; the exit status."""
    names, others = (fnmatch.filter(names_of(revision), options.show or options.only) for revision in (here, there))
    if not (names or others):
        raise SystemExit(f"same_code: no kernel matches {options.show or options.only!r}")
    both = [name for name in names if name in others]
    keys = [(name, arch) for arch in options.arch for name in both]
    kernels = []
    for title, revision in ((options.revision, there), ("the working tree", here)):
        started = time.perf_counter()
        kernels.append(compiled(revision, keys))
        print(f"{title}: {len(keys)} kernels in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    result = compared(*kernels)
    result.only_here, result.only_there = [n for n in names if n not in others], [n for n in others if n not in names]
    for (name, arch), line in result.differing.items():
        print(f"{arch} {name}: {line}")
        if options.show:
            before, now = (found[name, arch] for found in kernels)
            print("\n".join(shown(before, now, arch)))
    for title, found in (("here", result.only_here), ("there", result.only_there)):
        if found:
            print(f"only {title}: {', '.join(found)}")
    print(result.summary())
    return int(result.is_failure(options.strict))


def main(arguments: list[str] | None = None, root: pathlib.Path = ROOT) -> int:
    options = parse(arguments)
    with checked_out(root, options.revision, options.jobs) as there, working_tree(root, options.jobs) as here:
        return compare(there, here, options)


if __name__ == "__main__":
    sys.exit(main())
