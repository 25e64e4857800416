"""Muon and NorMuon as optimizers of a recipe."""

import importlib

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    optimizers={"muon": "dtgpt.optim.muon.muon:MuonConfig", "normuon": "dtgpt.optim.muon.normuon:NorMuonConfig"}
)
# What recipes name, imported when it is asked for: every start reads this file, and few runs use Muon.
PUBLIC = {"Muon": "muon", "MuonConfig": "muon", "NorMuon": "normuon", "NorMuonConfig": "normuon"}


def __getattr__(name: str) -> type:
    if name not in PUBLIC:
        raise AttributeError(f"module 'dtgpt.optim.muon' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dtgpt.optim.muon.{PUBLIC[name]}"), name)
