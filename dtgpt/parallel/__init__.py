"""Everything that knows of more than one process: plans, meshes, and what a plan makes of the plain model."""
