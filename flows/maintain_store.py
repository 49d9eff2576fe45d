"""Verify and sweep a checkpoint root as a flow, for schedules: damage is found while an older generation is still whole."""
