"""Hypothesis for the format tests: no deadline, since a busy machine is no defect."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("formats", deadline=None)
settings.load_profile("formats")
