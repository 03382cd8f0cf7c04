"""Tests that run on real process groups need torch, which is an extra."""

from importlib.util import find_spec

collect_ignore_glob = ["*.py"] if find_spec("torch") is None else []
