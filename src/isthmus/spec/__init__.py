"""What a user declares: the specs that plan, lab, train and report all read.

Pure data with arithmetic on it. Nothing here imports torch or does I/O, except ``spec.load``, which
reads TOML files. ``base`` and ``units`` are the ground; a module for each subject; ``run`` and
``cluster`` are the two files that a user writes; ``tree`` walks all keys for help and suggestions.
"""
