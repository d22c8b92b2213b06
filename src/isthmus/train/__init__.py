"""The trainer: the loop that puts the library's parts together, and what surrounds it.

``start`` decides what to do and starts ranks (no torch), ``worker`` is one rank from its first
breath to its exit code, ``trainer`` is the loop, ``run_directory`` is where a run keeps itself.
"""
