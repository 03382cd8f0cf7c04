"""How each family of models writes its config: one reader a family, gathered in `READERS`.

A reader takes the config's fields and returns `Parts`; `planner.hf_config` puts the spec together.
"""
