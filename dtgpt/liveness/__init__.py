"""Processes of a run that find each other, and end together when one of them is lost."""
