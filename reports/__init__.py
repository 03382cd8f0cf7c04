"""Reads plans and estimates and reports on them, with no cost formula of its own."""
