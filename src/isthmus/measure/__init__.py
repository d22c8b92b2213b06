"""The one library that measures this machine: its links, its arithmetic, its disks, its limits.

The commands and benchmarks that show a measured number take it from here, so that two of them
never disagree about what it means.

- ``timing``: repeated samples, and the interleaved comparison of two variants;
- ``host``, ``cgroup``, ``interfaces``: what the machine says about itself, read and not measured;
- ``loopback``, ``disk``, ``compute``, ``allreduce``: what it does, measured;
- ``worker``: a child process that measures for us, and that may hang or crash;
- ``finding``, ``checks_*``, ``doctor``: judgement on these figures, and the list of checks.

Functions return frozen dataclasses with units in the names of their fields. Nothing here prints,
and importing it does not import torch.
"""
