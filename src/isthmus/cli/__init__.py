"""The command line: one file a verb.

A verb imports what it needs when it runs, so that ``isthmus --help`` stays quick. Data go to
stdout, everything else to stderr.
"""
