"""Recipes, plans and settings: what a run is asked for, and its checks. Nothing here starts a process."""
