"""Errors, console, files and locks, hardware facts, inert pickles: nothing here knows of models or plans."""
