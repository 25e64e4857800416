"""Modules beside a recipe file, which it imports."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(recipe_folders=("dtgpt.config.beside.folders:import_beside",))
