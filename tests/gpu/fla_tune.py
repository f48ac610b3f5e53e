"""How far Triton tunes FLA's kernels, which bring up to a hundred configurations each.

limit(n): every autotuner made after this tries n of its configurations, evenly spaced; FLA_CONFIGS=m says m
instead. FLA_PART=i/k leaves every k-th of those, from the i-th: k processes side by side compile all of them
into Triton's cache, where a process without FLA_PART then finds them (run.sh, `warm`)."""
import os

from triton.runtime import autotuner


def limit(n):
    n = int(os.environ.get("FLA_CONFIGS", n))
    part, parts = map(int, os.environ.get("FLA_PART", "0/1").split("/"))
    start = autotuner.Autotuner.__init__

    def fewer(self, fn, arg_names, configs, *rest, **named):
        kept = configs[:: -(-len(configs) // n) or 1]
        start(self, fn, arg_names, kept[part::parts] or kept[:1], *rest, **named)

    autotuner.Autotuner.__init__ = fewer
