"""Runs the plan. The only room that imports torch."""
