"""`python -m tritonkittens`: the demo, the inspector, the simulator, the tuner, and compiling ahead."""

import argparse
import os
import sys
from collections.abc import Sequence

CLOSED_PIPE = 128 + 13  # a shell's exit status of a command that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    Characters that the terminal's encoding lacks are printed as "?". A reader that closes the pipe early ends the
    command without a message.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return run(argv)
        finally:  # also after --help, which raises SystemExit
            print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return CLOSED_PIPE


def run(argv: Sequence[str] | None) -> int:
    """Parses the arguments and runs the command that they name."""
    from tritonkittens import __version__, warming
    from tritonkittens.inspect import cli
    from tritonkittens.sim import cli as check
    from tritonkittens.tune import cli as tuned

    about = "ThunderKittens' tile abstractions as a library on Triton."
    parser = argparse.ArgumentParser(prog="python -m tritonkittens", description=about)
    parser.add_argument("--version", action="version", version=f"tritonkittens {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "demo", help="a short tour: a kernel, its result checked, and the compiler's results; needs no GPU"
    )
    cli.add_arguments(
        commands.add_parser(
            "inspect",
            help="compile a kernel without a GPU and show registers, spills, shared memory, tensor-core instructions, "
            "main loops",
            description="Compiles a kernel without a GPU and shows the compiler's results: registers of each warp "
            "role and the cap, "
            "whether register reallocation took effect, spills, shared and tensor memory by buffer with ring stages "
            "and bank conflicts, "
            "tensor-core and TMA instructions, serialised wgmma, and the contents of the main loops.",
        )
    )
    checker = commands.add_parser(
        "check",
        help="run a kernel on the CPU under many schedules and report deadlocks, races, wrong byte counts and the "
        "like; needs no GPU",
        description="Runs a kernel with its example arguments in the simulator, under many legal interleavings, and "
        "reports its bugs.",
    )
    check.add_arguments(checker)
    tuned.add_arguments(
        commands.add_parser(
            "tuned",
            help="a problem's configuration, the tried ones and the reason for the winner; also makes the package's "
            "tables",
            description="Without arguments: the families of kernels and how many of their problems were tuned. With "
            "FAMILY: those problems. With FAMILY "
            "key=value …: why that problem has its configuration. With --export FAMILY: the results on disk as a "
            "table of the package.",
        )
    )
    warming.add_arguments(
        commands.add_parser(
            "warm",
            help="compile the kernels that a list of calls, or a traced model, will launch; needs no GPU",
            description="Compiles the kernels of calls and of their backwards at the same time, and runs none of them. "
            "Triton's cache on disk has them then (TRITON_CACHE_DIR), and processes that make the calls load them.",
        )
    )
    arguments = parser.parse_args(argv)
    modules = {"inspect": cli, "check": check, "tuned": tuned, "warm": warming}
    if arguments.command in modules:
        return modules[arguments.command].run(arguments)
    from tritonkittens.demo import main as demo  # imported here because it loads torch and every kernel

    demo()
    return 0


if __name__ == "__main__":
    sys.exit(main())
