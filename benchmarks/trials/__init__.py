"""The runner of experiments: protocols, runs in pieces, what is kept of them, and what they can say.

protocol.py   what is asked, written down before the runs     inference.py   t-intervals, Holm, smallest effects
pieces.py     one run, in pieces that may be killed           findings.py    the comparisons of a protocol
sources.py    which code makes a run                          showing.py     tables and pictures
records.py    what is kept of a finished run                  pages.py       tables for the docs
sweep.py      arms × seeds                                    base.py        the base policy and its gates
once.py       what all runs of an experiment share            command.py     what the commands share
"""
