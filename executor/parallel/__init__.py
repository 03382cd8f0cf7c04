"""How each dimension runs; the same file names as planner/parallel, each with `apply`."""
