"""Every benchmark, one after the other, each in a process of its own: `python -m bench [--out FOLDER]`."""
import subprocess
import sys

BENCHMARKS = ("gemm", "attention", "launch_overhead", "simulator")

if __name__ == "__main__":
    sys.exit(max(subprocess.run([sys.executable, "-m", f"bench.{name}", *sys.argv[1:]]).returncode for name in BENCHMARKS))
