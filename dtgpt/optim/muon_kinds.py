"""Muon and NorMuon as optimizers of a recipe."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    optimizers={"muon": "dtgpt.optim.muon:MuonConfig", "normuon": "dtgpt.optim.normuon:NorMuonConfig"}
)
