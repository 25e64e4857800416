"""Roles whose sums come in pieces here."""

from dtgpt.models.roles import INNER, Role

ROLES = (*INNER, Role.ROUTER, Role.JOINT_NORM, Role.SINKS)
WHOLE = (Role.ROUTER, Role.ROW_STACK)  # of these, gradients of what all ranks hold are whole on each
