"""Is a 70B Llama on 8 ranks x 2 chunks described in 45 CPU seconds and 1 GB, without a GPU and
without weights?

python examples/benchmarks/inspect_70b.py
"""

import resource
import subprocess
import sys
import time

SECONDS, GIGABYTES = 45, 1
COMMAND = [
    "-m",
    "zbcompile.inspect",
    "examples/targets.py:llama_70b",
    "--fake",
    "--ranks",
    "8",
    "--schedule",
    "zb-v",
]


def main() -> int:
    begin = time.monotonic()
    done = subprocess.run([sys.executable, *COMMAND], stdout=subprocess.PIPE, text=True, check=True)
    elapsed, used = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    print(done.stdout.splitlines()[0])
    worked = used.ru_utime + used.ru_stime  # what counts: a busy machine takes longer by the clock
    print(f"elapsed     {elapsed:6.1f} s")
    print(f"CPU         {worked:6.1f} s   of {SECONDS} s")
    print(f"peak memory {peak:6.2f} GB  of {GIGABYTES} GB")
    return int(worked > SECONDS or peak > GIGABYTES)


if __name__ == "__main__":
    sys.exit(main())
